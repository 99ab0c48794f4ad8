"""Text to ids beside transformers, in two versions, and beside the rules of GGUF files.

`python -m tests.models.transformers_ids` records the ids of the installed transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from gguf import TokenType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from jaxkv.models.loading import gguf
from jaxkv.models.loading.chat import Chat, next_turn_ids
from jaxkv.models.loading.sentencepiece import serialise
from jaxkv.models.loading.tokenizer import read_tokenizer
from tests.models.tokenizer_files import (
    MERGES,
    WORDS,
    sentencepiece_vocabulary,
    write_byte_level,
    write_gguf,
    write_llama_2,
    write_sentencepiece,
)

RECORD = Path(__file__).with_name("transformers_ids.json")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
M = "<|im_start|>"
# Marks at the start, in the middle, at the end, doubled, beside spaces, and none.
TEXTS = [
    f"{M}user", f"user{M}user", f"user{M}", f"{M}{M}user", f" {M} user", f"user  {M}  user ",
    f"user\n\n{M}\nuser", f"a{M}b {M}c", "user  system", "  user", "é 東京\tuser", "</s>user</s> a",
    f"</s>{M}</s>", "<|im_star|>", f"<{M}>", M[:-1], "", "a\n", f"{M}us{M}er",
]  # fmt: skip


def flagged(flag: str) -> AddedToken:
    return AddedToken(M, **({"normalized": False, "special": False} | {flag: True}))


def entry(**flags: bool) -> dict[str, Any]:
    return {"content": M} | dict.fromkeys(FLAGS, False) | flags


# In a SentencePiece folder the token has the first id after the vocabulary.
NEXT = str(len(sentencepiece_vocabulary({})[0]))
USER = {M: Kind.USER_DEFINED}
LEGACY, FIRST = {"legacy": True}, {"legacy": False}
CASES: dict[str, Callable[[Path], Path]] = {
    **{f"byte-level, {flag}": lambda path, flag=flag: write_byte_level(
        path, ["</s>", flagged(flag)]) for flag in FLAGS},
    "byte-level, NFC": lambda path: write_byte_level(
        path, ["</s>", flagged("normalized")], normalizer=normalizers.NFC()),
    "byte-level, added_tokens_decoder": lambda path: write_byte_level(
        path, ["</s>", flagged("normalized")],
        {"added_tokens_decoder": {str(len(WORDS) + 1): entry(lstrip=True, special=True)}}),
    "byte-level, new token": lambda path: write_byte_level(
        path, ["</s>"], {"added_tokens_decoder": {str(len(WORDS) + 1): entry(rstrip=True)}}),
    "byte-level, additional": lambda path: write_byte_level(
        path, ["</s>"], {"additional_special_tokens": [M], "pad_token": "<pad>"}),
    "byte-level, overlapping": lambda path: write_byte_level(
        path, ["</s>", M, "<|im", "start|>us", AddedToken("|>u", special=False, normalized=True)]),
    "byte-level, a space": lambda path: write_byte_level(
        path, ["</s>", M], {"add_prefix_space": True}),
    "metaspace, first": lambda path: write_byte_level(
        path, ["</s>", M], pre_tokenizer=pre_tokenizers.Sequence([
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    **{f"llama-2, {flag}": lambda path, flag=flag: write_llama_2(
        path, AddedToken(M, **({"special": False, "normalized": True} | {flag: True})))
       for flag in FLAGS},
    "llama-2, not normalized": lambda path: write_llama_2(
        path, AddedToken(M, special=False, normalized=False)),
    "sentencepiece, legacy": lambda path: write_sentencepiece(path, USER, LEGACY),
    "sentencepiece, not legacy": lambda path: write_sentencepiece(path, USER, FIRST),
    "sentencepiece, no space": lambda path: write_sentencepiece(
        path, USER, FIRST | {"add_prefix_space": False}),
    "sentencepiece, no byte pieces": lambda path: write_sentencepiece(
        path, USER, LEGACY, byte_pieces=()),
    "sentencepiece, control": lambda path: write_sentencepiece(path, {M: Kind.CONTROL}, LEGACY),
    "sentencepiece, added_tokens.json": lambda path: write_sentencepiece(
        path, {}, FIRST, {M: int(NEXT)}),
    **{f"sentencepiece, {flag}": lambda path, flag=flag: write_sentencepiece(
        path, {}, FIRST | {"added_tokens_decoder": {NEXT: entry(**{flag: True})}})
       for flag in FLAGS},
    "sentencepiece, decoder before json": lambda path: write_sentencepiece(
        path, {}, FIRST | {"added_tokens_decoder": {NEXT: entry()}}, {"user": int(NEXT)}),
    "sentencepiece, additional": lambda path: write_sentencepiece(
        path, {}, FIRST | {"additional_special_tokens": [M]}),
}  # fmt: skip
# transformers 5 reads `legacy: true` as a space before each part that has none; version 4 puts it
# before every part, as SentencePiece does. 5 ignores `add_prefix_space` beside a tokenizer.json.
NOT_LIKE_5 = {"sentencepiece, legacy", "sentencepiece, no byte pieces", "sentencepiece, control",
              "byte-level, a space"}  # fmt: skip


def our_ids(folder: Path) -> list[list[int]]:
    tokenizer = read_tokenizer(folder)
    return [tokenizer.encode(text, bos=False) for text in TEXTS]


@pytest.mark.parametrize("version", json.loads(RECORD.read_text()))
@pytest.mark.parametrize("case", CASES)
def test_ids_agree_with_recorded_ones(case, version, tmp_path):
    if case in NOT_LIKE_5 and version.startswith("5."):
        return
    recorded = json.loads(RECORD.read_text())[version][case]
    assert dict(zip(TEXTS, our_ids(CASES[case](tmp_path)), strict=True)) == dict(
        zip(TEXTS, recorded, strict=True)
    )


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.startswith(("byte", "meta", "llama"))]
)
@given(parts=st.lists(st.sampled_from([M, M[:4], M[4:], "</s>", "user", " ", "\n", "é", "|>u"])))
def test_parts_agree_with_the_package(case, parts, tmp_path_factory):
    """A text that is cut by us has the ids that the package finds by itself."""
    tokenizer = _tokenizer(case, tmp_path_factory)
    text = "".join(parts)
    assert tokenizer.encode(text, bos=False, separator="\U000f0000") == tokenizer.encode(
        text, bos=False
    )


_read: dict[str, Any] = {}


def _tokenizer(case: str, tmp_path_factory) -> Any:
    if case not in _read:
        _read[case] = read_tokenizer(CASES[case](tmp_path_factory.mktemp("case")))
    return _read[case]


# What llama.cpp does (src/llama-vocab.cpp): control, user-defined and unknown tokens are cut out of
# the text first, each in all of it, the longest first.
def partition(text: str, marks: dict[str, int]) -> Iterable[str | int]:
    fragments: list[str | int] = [text]
    for mark in sorted(marks, key=len, reverse=True):
        cut = []
        for fragment in fragments:
            while isinstance(fragment, str) and mark in fragment:
                before, _, fragment = fragment.partition(mark)
                cut += [before, marks[mark]]
            cut.append(fragment)
        fragments = cut
    return [fragment for fragment in fragments if fragment != ""]


OVERLAPPING = {"<|im": Kind.CONTROL, "start|>us": Kind.USER_DEFINED}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("add_space", [True, False])
@pytest.mark.parametrize("tokens_of_case", [{}, OVERLAPPING])
def test_ids_of_gguf_files(kind, add_space, tokens_of_case, tmp_path):
    marks = USER | {"<tool>": Kind.CONTROL} | tokens_of_case
    header = write_gguf(tmp_path / "m.gguf", kind, marks, add_space_prefix=add_space)
    tokenizer = gguf.read_tokenizer(header)
    tokens = header.fields["tokenizer.ggml.tokens"]
    ids = {text: tokens.index(text) for text in marks}
    if kind == "gpt2":
        original = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                {word: i for i, word in enumerate(WORDS)}, [tuple(m.split(" ")) for m in MERGES]
            )
        )
        original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

        def encode(text: str) -> list[int]:
            return original.encode(text).ids
    else:
        ids |= {text: tokens.index(text) for text in ("<unk>", "<s>", "</s>")}
        # Marks as control pieces, which SentencePiece never finds; a space as its own letter.
        model = serialise(*sentencepiece_vocabulary(dict.fromkeys(marks, Kind.CONTROL)), False)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)

        def encode(text: str) -> list[int]:
            return processor.encode("▁" * add_space + text)

    for text in (*TEXTS, f"{M}user", "<tool><tool> a", "<unk>a"):
        expected = [
            i for part in partition(text, ids)
            for i in ([part] if isinstance(part, int) else encode(part))
        ]  # fmt: skip
        assert tokenizer.encode(text, bos=False) == expected, text
    assert (
        tokens[tokenizer.encode(f"{M}user", bos=False)[1]]
        == ("▁user" if kind == "llama" and add_space else "user")
        or tokens_of_case
    )


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_letters_without_pieces(kind, tmp_path):
    """A vocabulary without byte pieces encodes them as the unknown token."""
    if kind == "folder":
        tokenizer = read_tokenizer(write_sentencepiece(tmp_path, USER, byte_pieces=()))
    else:
        header = write_gguf(tmp_path / "m.gguf", "llama", USER, byte_pieces=())
        tokenizer = gguf.read_tokenizer(header)
    model = serialise(*sentencepiece_vocabulary(USER, ()), True)
    package = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ("user", "é user", "東京a"):
        assert tokenizer.encode(text, bos=False) == package.encode(text)


PLAIN = (
    "{{ bos_token }}{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


@pytest.mark.parametrize("template", [PLAIN, PLAIN.replace("### ", M), None])
@pytest.mark.parametrize("case", CASES)
def test_turns_are_one_text(case, template, tmp_path):
    """Turns that are encoded one after another have the ids of the whole conversation."""
    tokenizer = read_tokenizer(CASES[case](tmp_path))
    chat = Chat(template)
    user, answer = ({"role": "user", "content": "a user"}, {"role": "assistant", "content": "us"})
    first = next_turn_ids(tokenizer, chat, [], "a user", begins=True)
    second = next_turn_ids(tokenizer, chat, [user, answer], "a user", begins=False)
    if template is None:
        expected = tokenizer.encode("a user\nus\na user\n")
    else:
        expected = tokenizer.encode(chat.render([user, answer, user]), bos=False)
    assert [*first, *tokenizer.encode("us", bos=False, start=False), *second] == expected


@pytest.mark.parametrize("case", CASES)
def test_a_text_that_a_stop_string_cuts(case, tmp_path):
    """The rest of an answer, encoded again after its first tokens, adds no space to it."""
    tokenizer = read_tokenizer(CASES[case](tmp_path))
    text = "a user\nuser  us"
    expected = tokenizer.decode(tokenizer.encode(text, bos=False))
    for size in range(1, len(text)):
        before = tokenizer.encode(text[:size], bos=False)
        rest = tokenizer.encode(text[size:], bos=False, start=False)
        assert tokenizer.decode([*before, *rest]) == expected


def test_special_tokens_in_sentencepiece_text_add_no_space(tmp_path):
    """`</s>` in a message of a template in plain text: the parts around it are one text."""
    tokenizer = read_tokenizer(write_sentencepiece(tmp_path, {}, LEGACY))
    (turn,) = (
        next_turn_ids(tokenizer, Chat(PLAIN), [], content, begins=True)
        for content in ["user</s>user"]
    )
    text = tokenizer.decode(turn, special=True)
    assert text == Chat(PLAIN).render([{"role": "user", "content": "user</s>user"}])
