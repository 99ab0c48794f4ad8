"""Tokenizers of GGUF files: splits by name, special tokens, BOS, SentencePiece, chat templates."""

from __future__ import annotations

import io
import json

import pytest
import sentencepiece
import tokenizers
from gguf import TokenType as Kind
from tokenizers import decoders, pre_tokenizers, trainers

from jaxkv.errors import UserError
from jaxkv.models.loading.gguf import read_chat, read_tokenizer
from jaxkv.models.loading.gguf.tokenizer import PRE_TOKENIZERS, splitter
from tests.models.gguf.files import CONTROL, add_bpe, written

TEXTS = (
    "Zoë said: naïve café, 東京 🙂👩‍🚀 – and   then\n\tleft. It's 3.14!  ",
    "In 1984, 12345 people  paid $1,000.50\n\n\n  each; it WASN'T  x²+½=٣٤५.",
    "def f(x):\n    return x['a'] * 10**6  # ok\r\n\tif x: pass\n",
    *("  ", "\n", " 7", "a"),
)


def trained(pre: pre_tokenizers.PreTokenizer) -> tuple[tokenizers.Tokenizer, list[str], list[str]]:
    """A byte-level BPE trained with a pre-tokenizer, its tokens in order, and its merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "the cat sat in 1984 and 2000 and 12345"] * 3, trainer)
    vocab = tokenizer.get_vocab()
    state = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer, sorted(vocab, key=vocab.get), [" ".join(pair) for pair in state]


# The published definitions, by other means than an expression of ours.
REFERENCES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_byte_level_bpe_agrees_with_the_original(name, tmp_path):
    original, tokens, merges = trained(REFERENCES[name])
    kinds = [CONTROL, CONTROL] + [Kind.NORMAL] * (len(tokens) - 2)

    def fill(writer):
        add_bpe(writer, tokens, kinds, merges, name)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)

    tokenizer = read_tokenizer(written(tmp_path / "m.gguf", fill))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (0, (1,), False)
    for text in (*TEXTS, "<|begin|>the cat<|end|>"):
        ids = tokenizer.encode(text)
        assert ids == original.encode(text).ids, text
        assert tokenizer.decode(ids, special=True) == text
    assert tokenizer.decode(tokenizer.encode("<|begin|>the cat<|end|>")) == "the cat"


@pytest.mark.parametrize("name", REFERENCES)
def test_splits_agree_on_every_character(name):
    """Each with letters, digits and spaces around it: character classes are the same."""
    actual, expected = splitter(PRE_TOKENIZERS[name]), REFERENCES[name]
    for block in range(0, 0x30000, 512):
        letters = [chr(i) for i in range(block, block + 512) if not 0xD800 <= i < 0xE000]
        text = "".join(f"a{c}1  {c}!" for c in letters)
        assert actual.pre_tokenize_str(text) == expected.pre_tokenize_str(text), hex(block)


# Text -> its pieces. Digits: together, one by one, or in threes; contractions; white space.
SPLITS = {
    "gpt-2": ("it's IT'S 12345  x\n\n y", "it|'s| IT|'|S| 12345| | x|\n\n| y"),
    "smollm": ("it's IT'S 12345  x\n\n y", "it|'s| IT|'|S| |1|2|3|4|5| | x|\n\n| y"),
    "falcon": ("it's 12345  x+=1\n\n y", "it|'|s| |123|45| | x|+=|1|\n\n| y"),
    "glm4": ("it's IT'S 12345  x\n\n y", "it|'s| IT|'S| |123|45| | x|\n\n| y"),
    "llama-bpe": ("it's IT'S 12345  x\n\n y", "it|'s| IT|'S| |123|45| | x|\n\n| y"),
    "qwen2": ("it's IT'S 12345  x\n\n y", "it|'s| IT|'S| |1|2|3|4|5| | x|\n\n| y"),
    "tekken": ("it's HTTPServer 12  x\n\n y", "it|'s| HTTPServer| |1|2| | x|\n\n| y"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_each_pre_tokenizer(name):
    text, pieces = SPLITS[name]
    spans = splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(text)
    assert "|".join(text[first:last] for _, (first, last) in spans) == pieces


def byte_level(
    pre: str | None = "smollm",
    bos: int | None = 0,
    adds_bos: bool | None = None,
    extra=lambda w: None,
):
    """A function that adds a byte-level tokenizer without merges to a writer."""

    def fill(writer):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = ["<|begin|>", "<|end|>", *alphabet, "<think>", "ab"]
        kinds = [CONTROL, CONTROL, *[Kind.NORMAL] * 256, Kind.USER_DEFINED, Kind.NORMAL]
        add_bpe(writer, tokens, kinds, ["a b"], pre)
        if bos is not None:
            writer.add_bos_token_id(bos)
        if adds_bos is not None:
            writer.add_add_bos_token(adds_bos)
        writer.add_eos_token_id(1)
        extra(writer)

    return fill


@pytest.mark.parametrize(
    "pre, bos, says, adds",
    [
        ("smollm", 0, None, False),  # byte-level BPE that says nothing: no
        ("smollm", 0, True, True),
        ("smollm", 0, False, False),
        ("smollm", None, True, False),  # there is none to add
        ("llama-bpe", 0, None, True),  # llama.cpp adds one for this pre-tokenizer
        ("llama-bpe", 0, False, False),
        ("tekken", 0, None, True),
        ("qwen2", 0, None, False),
    ],
)
def test_bos_of_byte_level_files(pre, bos, says, adds, tmp_path):
    tokenizer = read_tokenizer(written(tmp_path / "m.gguf", byte_level(pre, bos, says)))
    assert tokenizer.adds_bos is adds and tokenizer.bos == bos
    assert (tokenizer.encode("ab")[0] == 0) is adds


def test_special_tokens_are_matched_whole(tmp_path):
    tokenizer = read_tokenizer(written(tmp_path / "m.gguf", byte_level()))
    ids = tokenizer.encode("<|begin|>ab<think>ab<|end|>")
    assert ids == [0, 259, 258, 259, 1]
    # Control tokens decode to nothing, user-defined ones to their text.
    assert tokenizer.decode(ids) == "ab<think>ab"
    assert tokenizer.decode(ids, special=True) == "<|begin|>ab<think>ab<|end|>"


def test_composed_characters(tmp_path):
    """Qwen2 normalises a text to NFC; SmolLM2 does not."""
    for pre, composes in (("qwen2", True), ("smollm", False)):
        tokenizer = read_tokenizer(written(tmp_path / f"{pre}.gguf", byte_level(pre)))
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) is composes


NAN = float("nan")


def put(writer, name: str, value) -> None:
    """Replace a field of the tokenizer."""
    writer.kv_data[0].pop(key := f"tokenizer.ggml.{name}", None)
    writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)


def pieces(**fields):
    """A function that adds a SentencePiece vocabulary of two tokens, with these fields."""

    def fill(writer):
        writer.add_tokenizer_model("llama")
        for name, value in ({"tokens": ["<unk>", "a"], "scores": [0.0, -1.0]} | fields).items():
            put(writer, name, value)

    return fill


REFUSED = {
    "no pre-tokenizer": (byte_level(None), "missing field tokenizer.ggml.pre, .*supported: gpt-2"),
    "pre-tokenizer": (byte_level("default"), "unsupported pre-tokenizer 'default'; supported: gpt"),
    "no model": (lambda w: None, "unsupported tokenizer.ggml.model None; supported: gpt2"),
    "more tokens than rows": (
        pieces(tokens=["a"] * 513),
        "must have at most one token per row of token_embd.weight, 512, got 513; download",
    ),
    "an id without token": (byte_level(bos=999), "bos_token_id must be from 0 to 259, got 999"),
    "merges of other tokens": (
        lambda w: add_bpe(w, ["a"], [Kind.NORMAL], ["a b"], "smollm"),
        "its merges do not fit its tokens",
    ),
    "fewer types": (
        lambda w: add_bpe(w, ["a", "b"], [Kind.NORMAL], [], "smollm"),
        "token_type must have one entry per token, 2, got 1; download it again",
    ),
    "no scores": (
        lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"])),
        "missing field tokenizer.ggml.scores; download it again",
    ),
    "scores that are not finite": (pieces(scores=[0.0, NAN]), "scores must be finite, got nan"),
    "types of text": (pieces(token_type=["a", "b"]), "token_type must be of type list of int"),
    "one token": (pieces(tokens="a"), "tokens must be of type list of str, got 'a'; download"),
    "no merges": (
        byte_level(extra=lambda w: w.kv_data[0].pop("tokenizer.ggml.merges")),
        "missing field tokenizer.ggml.merges; download it again",
    ),
    "merges of one": (
        byte_level(extra=lambda w: put(w, "merges", ["a b", "abc"])),
        "merges must be pairs of tokens with a space, got 'abc'; download",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_tokenizers_are_refused(case, tmp_path):
    fill, message = REFUSED[case]
    header = written(tmp_path / "m.gguf", fill)
    with pytest.raises(UserError, match=message) as error:
        read_tokenizer(header)
    assert str(header.path) in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def original() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback and a user-defined token, as in Llama 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, "the cat sat on the mat and then left"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        user_defined_symbols=["<think>"],
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_fields(original: sentencepiece.SentencePieceProcessor):
    """A function that adds a SentencePiece vocabulary to a writer, as llama.cpp converts it."""

    def kind(i: int) -> Kind:
        checks = {Kind.UNKNOWN: original.is_unknown, Kind.CONTROL: original.is_control,
                  Kind.BYTE: original.is_byte, Kind.UNUSED: original.is_unused}  # fmt: skip
        user_defined = original.id_to_piece(i) == "<think>"
        return next(
            (kind for kind, holds in checks.items() if holds(i)),
            Kind.USER_DEFINED if user_defined else Kind.NORMAL,
        )

    def fill(writer):
        ids = range(original.vocab_size())
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([original.id_to_piece(i) for i in ids])
        writer.add_token_scores([original.get_score(i) for i in ids])
        writer.add_token_types([kind(i) for i in ids])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    return fill


def test_sentencepiece_agrees_with_the_original(original, tmp_path):
    actual = read_tokenizer(written(tmp_path / "m.gguf", sentencepiece_fields(original)))
    # A file that says nothing about BOS has one.
    assert (actual.bos, actual.eos, actual.adds_bos, actual.vocab) == (1, (2,), True, 420)
    for text in (*TEXTS, "\U0001f600 unseen \u0416"):
        assert actual.encode(text) == [1, *original.encode(text)], text
        assert actual.decode(actual.encode(text)) == original.decode(original.encode(text))
    # llama.cpp cuts at user-defined tokens first, and what follows begins with a space.
    think = original.piece_to_id("<think>")
    expected = [*original.encode("the"), think, *original.encode("cat")]
    assert actual.encode("the<think>cat", bos=False) == expected
    assert actual.encode("</s>", bos=False) == [2] and actual.decode([1, 2]) == ""


def test_chat_templates(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    fill = byte_level(extra=lambda w: w.add_chat_template(template))
    chat = read_chat(written(tmp_path / "m.gguf", fill))
    assert chat.render([{"role": "user", "content": "Hi"}]) == "<|begin|>Hi<|end|>"
    chat = read_chat(written(tmp_path / "n.gguf", byte_level()))
    with pytest.raises(UserError, match="no chat template"):
        chat.render([{"role": "user", "content": "Hi"}])
