"""Tokenizers: published ids, exact streaming, fields of their files, and refused files."""

from __future__ import annotations

import inspect
import json
import shutil
import time
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import tokenizers
from gguf import TokenType as Kind
from tokenizers import decoders, pre_tokenizers, processors, trainers

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.loading import gguf
from jaxkv.models.loading.gguf import tokenizer as gguf_tokenizer
from jaxkv.models.loading.hf import tokenizer_config
from jaxkv.models.loading.tokenizer import Pieces, Tokenizer, read_tokenizer
from tests.models.folders import write_json
from tests.models.tokenizer_files import (
    WORDS,
    sentencepiece_vocabulary,
    write_byte_level,
    write_gguf,
    write_sentencepiece,
)
from tests.tiny import END, write_tiny

TEXT = "Zoë said: naïve café, 東京 🙂👩‍🚀 – and   then\n\tleft. It's 3.14!  "


def backend(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    """A byte-level BPE as in Llama 3, Qwen and SmolLM2, with two special tokens."""
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "the cat sat on the mat and then left"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": None, "eos_token": "<|end|>"})
    return folder


def with_post_processor(folder: Path, out: Path) -> Path:
    """The same tokenizer, which prepends <|begin|> as that of Llama 3 does."""
    tokenizer = backend(folder)
    begin = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), begin])
    tokenizer.save(str(out / "tokenizer.json"))
    return out


@pytest.fixture(params=["stories", "sentencepiece", "byte_level"])
def tokenizer(request, tmp_path) -> Tokenizer:
    """One tokenizer of each file format."""
    if request.param == "byte_level":
        return read_tokenizer(request.getfixturevalue("byte_level"))
    stories = request.getfixturevalue("stories")
    if request.param == "stories":
        return read_tokenizer(stories)
    for name in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(stories / name, tmp_path)
    return read_tokenizer(tmp_path)


def test_reference_ids(stories):
    """Ids recorded from transformers, and their text."""
    tokenizer = read_tokenizer(stories)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (1, (2,), True)
    assert tokenizer.vocab == 512
    assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    assert tokenizer.encode("Once upon a time", bos=False) == [403, 407, 261, 378]
    assert tokenizer.encode("") == [1] and tokenizer.encode("", bos=False) == []
    assert tokenizer.decode([1, 403, 407, 261, 378]) == "Once upon a time"
    assert tokenizer.decode([407, 261], start=False) == " upon a"
    assert tokenizer.decode([1, 403], special=True) == "<s> Once"


def test_a_whole_file_is_encoded_in_linear_time(stories, shared):
    text = (shared / "text" / "tinystories" / "valid.txt").read_text(encoding="utf-8")
    expected = json.loads((stories / "perplexity.json").read_text())["first4096_ids"]
    tokenizer = read_tokenizer(stories)
    start = time.perf_counter()
    ids = tokenizer.encode(text, bos=True)
    assert ids[:4096] == expected and len(ids) > 250_000
    assert (
        time.perf_counter() - start < 20
    )  # 0.3 s on an idle machine; a quadratic algorithm takes longer
    assert tokenizer.decode(ids) == " ".join(text.strip(" ").split("  "))


def test_sentencepiece_agrees_with_json(stories, tmp_path):
    shutil.copy(stories / "tokenizer.model", tmp_path)
    actual, expected = read_tokenizer(stories), read_tokenizer(tmp_path)
    assert actual.table == expected.table and actual.special == expected.special
    assert (actual.bos, actual.eos, actual.adds_bos) == (
        expected.bos,
        expected.eos,
        expected.adds_bos,
    )
    for text in (TEXT, "a", "  two  spaces ", "</s> end", "東京"):
        assert actual.encode(text) == expected.encode(text), text
    write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": False, "bos_token": "<s>"})
    quiet = read_tokenizer(tmp_path)
    assert not quiet.adds_bos and quiet.bos == 1
    assert quiet.encode("a")[:1] != [1] == quiet.encode("a", bos=True)[:1]


@pytest.mark.parametrize("folder", ["stories", "byte_level"])
def test_decode_agrees_with_the_package(folder, request):
    """On random ids. For SentencePiece, byte tokens are left out where they are invalid UTF-8."""
    folder = request.getfixturevalue(folder)
    tokenizer, reference = read_tokenizer(folder), backend(folder)
    random = np.random.default_rng(0)
    tried = 0
    for _ in range(300):
        ids = random.integers(0, tokenizer.vocab, 12).tolist()
        text = tokenizer.decode(ids)
        if "\ufffd" in text and tokenizer.strip:
            ids = [i for i in ids if not reference.id_to_token(i).startswith("<0x")]
            text = tokenizer.decode(ids)
        tried += 1
        assert text == reference.decode(ids, skip_special_tokens=True), ids
    assert tried == 300


def test_pieces_join_to_the_decoded_text(tokenizer):
    """Random ids, one by one, give the text of `decode`, also with incomplete characters."""
    random = np.random.default_rng(1)
    texts = [tokenizer.encode(TEXT), [], *random.integers(0, tokenizer.vocab, (100, 20)).tolist()]
    for ids in texts:
        for start in (True, False):
            pieces = Pieces(tokenizer, start=start)
            parts = [pieces.push(i) for i in ids]
            assert "".join(parts) + pieces.end() == tokenizer.decode(ids, start=start)


def test_pieces_contain_whole_characters(tokenizer):
    pieces = Pieces(tokenizer)
    parts = [pieces.push(i) for i in tokenizer.encode("a 東京🙂 b")]
    assert pieces.end() == "" and "".join(parts) == "a 東京🙂 b"
    assert not any("\ufffd" in part for part in parts)
    half = tokenizer.encode("東", bos=False)[:-1]
    assert tokenizer.decode(half).endswith("\ufffd")


def test_the_bos_follows_the_post_processor(byte_level, tmp_path):
    plain = read_tokenizer(byte_level)
    assert (plain.bos, plain.adds_bos, plain.eos) == (None, False, (1,))
    assert plain.encode("a", bos=True) == plain.encode("a", bos=False) == plain.encode("a")
    begins = read_tokenizer(with_post_processor(byte_level, tmp_path))
    assert (begins.bos, begins.adds_bos) == (0, True)
    assert begins.encode("a") == [0, *begins.encode("a", bos=False)]


def test_ids_from_the_model_config(byte_level, tmp_path):
    shutil.copy(byte_level / "tokenizer.json", tmp_path)
    write_json(tmp_path / "config.json", {"bos_token_id": 0, "eos_token_id": [1, 5]})
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (0, (1, 5), False)
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<|end|>"}})
    assert read_tokenizer(tmp_path).eos == (1,)


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([tokenizer.vocab, tokenizer.vocab + 7]) == ""


def test_invalid_tokenizers_are_refused(tmp_path, byte_level):
    with pytest.raises(UserError, match="no such folder"):
        read_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no tokenizer in"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"tokenizer.model is corrupt"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"tokenizer.json is corrupt"):
        read_tokenizer(tmp_path)
    reference = backend(byte_level)
    reference.decoder = decoders.WordPiece()
    reference.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="unsupported decoder WordPiece"):
        read_tokenizer(tmp_path)
    with pytest.raises(UserError, match="lone surrogate at character 1"):
        read_tokenizer(byte_level).encode("a\udcff")


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_a_metaspace_decoder(scheme, tmp_path):
    """The decoder of some Mistral and Llama conversions."""
    reference = tokenizers.Tokenizer(tokenizers.models.BPE())
    reference.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    reference.decoder = decoders.Metaspace(prepend_scheme=scheme)
    reference.train_from_iterator(["the cat sat"], trainers.BpeTrainer(show_progress=False))
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer.encode("the cat sat")
    assert tokenizer.decode(ids) == reference.decode(ids) == "the cat sat"
    assert tokenizer.strip == (scheme == "always")


M = "<|im_start|>"
NEXT = len(sentencepiece_vocabulary({})[0])
MARKED = f"</s> user{M}user"
# Field -> a value that changes ids, in a folder with a tokenizer.model.
CHANGES = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "legacy": False,
    "added_tokens_decoder": {str(NEXT): {"content": M}},
    "bos_token": "</s>",
    **{name: "user" for name in tokenizer_config.NAMED if name not in ("bos_token", "unk_token")},
    "unk_token": "user",
    "additional_special_tokens": [M],
    "extra_special_tokens": {"image_token": M},
    "model_specific_special_tokens": {"image_token": M},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_changes_ids_is_applied(name, tmp_path):
    plain = read_tokenizer(write_sentencepiece(tmp_path / "a", {}))
    changed = read_tokenizer(write_sentencepiece(tmp_path / "b", {}, {name: CHANGES[name]}))
    assert changed.encode(MARKED) != plain.encode(MARKED)


@pytest.mark.parametrize("name", tokenizer_config.REFUSED)
@pytest.mark.parametrize("write", [write_sentencepiece, write_byte_level])
def test_a_field_that_is_not_supported_is_refused(name, write, tmp_path):
    value = tokenizer_config.REFUSED[name]
    unsupported = {"alpha": 0.1} if isinstance(value, dict) else not value
    with pytest.raises(UserError, match=f"tokenizer_config.json: {name} must be {value} or absent"):
        read_tokenizer(write(tmp_path, {M: Kind.CONTROL}, {name: unsupported}))
    read_tokenizer(write(tmp_path, {M: Kind.CONTROL}, {name: value}))


@pytest.mark.parity
def test_every_field_of_transformers_is_known():
    """The arguments of its tokenizers, from which tokenizer_config.json is written."""
    import transformers

    classes = (transformers.LlamaTokenizer, transformers.GPT2Tokenizer)
    fields = {name for kind in classes for name in inspect.signature(kind.__init__).parameters}
    fields -= {"self", "kwargs", "vocab", "merges"}
    known_names = {*tokenizer_config.NAMED, *tokenizer_config.LISTS, *tokenizer_config.APPLIED,
             *tokenizer_config.REFUSED, *tokenizer_config.UNUSED}  # fmt: skip
    assert fields <= known_names
    named = transformers.PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    assert set(named) <= {*tokenizer_config.NAMED, *tokenizer_config.LISTS}


def test_every_field_of_gguf_headers_is_known():
    fields = vars(package.Keys.Tokenizer).values()
    prefix = gguf_tokenizer.PREFIX
    names = {key.removeprefix(prefix) for key in fields
             if isinstance(key, str) and key.startswith(prefix)}  # fmt: skip
    refused = {"precompiled_charsmap"}  # of other kinds of vocabulary
    assert names - {*gguf_tokenizer.APPLIED, *gguf_tokenizer.UNUSED} == refused


GGUF_CHANGES = {
    "add_bos_token": False,
    "bos_token_id": 2,
    "add_space_prefix": False,
    "remove_extra_whitespaces": True,
}


@pytest.mark.parametrize("name", GGUF_CHANGES)
def test_a_field_of_a_gguf_header_is_applied(name, tmp_path):
    fields = {"bos_token_id": 1} | {name: GGUF_CHANGES[name]}
    plain = gguf.read_tokenizer(write_gguf(tmp_path / "a.gguf", "llama", {}, bos_token_id=1))
    changed = gguf.read_tokenizer(write_gguf(tmp_path / "b.gguf", "llama", {}, **fields))
    assert changed.encode("a  user ") != plain.encode("a  user ")


@pytest.mark.parametrize("key, value", [
    ("precompiled_charsmap", "x"), ("normalizer.lowercase", "yes"), ("a_later_field", "x"),
])  # fmt: skip
def test_another_field_of_a_gguf_header_is_refused(key, value, tmp_path):
    header = write_gguf(tmp_path / "m.gguf", "llama", {})
    header.fields[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(UserError, match=f"unsupported field tokenizer.ggml.{key}, got '{value}'"):
        gguf.read_tokenizer(header)


WRONG = {
    "another id": ({"added_tokens_decoder": {"7": {"content": M}}}, "must have its id in the voc"),
    "no text": ({"added_tokens_decoder": {"7": {}}}, "added tokens must be texts with ids"),
    "no id": ({"added_tokens_decoder": {"x": {"content": M}}}, "added tokens must be texts with"),
    "empty": ({"added_tokens_decoder": {str(NEXT): {"content": ""}}}, "is empty or below 0"),
    "a flag": ({"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields_are_one_line(name, tmp_path):
    config, message = WRONG[name]
    with pytest.raises(UserError, match=message) as error:
        read_tokenizer(write_sentencepiece(tmp_path, {}, config))
    assert "\n" not in str(error.value)


PAD = "[PAD]"
BEYOND = {
    "pad_token": lambda path, rows: write_sentencepiece(path, {}, {"pad_token": PAD}),
    "added_tokens.json": lambda path, rows: write_sentencepiece(path, {}, {}, {PAD: rows}),
    "added_tokens_decoder": lambda path, rows: write_sentencepiece(
        path, {}, {"added_tokens_decoder": {str(rows): {"content": PAD}}, "eos_token": PAD}),
    "json, pad_token": lambda path, rows: write_byte_level(path, ["<s>"], {"pad_token": PAD}),
    "json, added_tokens": lambda path, rows: write_byte_level(path, ["<s>", PAD]),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_a_token_without_a_row_in_the_embedding_is_text(name, tmp_path):
    """As in folders whose padding token the model lacks."""
    rows = len(WORDS) + 1 if name.startswith("json") else NEXT
    folder = BEYOND[name](tmp_path, rows)
    assert rows in read_tokenizer(folder).encode(f"a{PAD}")
    write_json(folder / "config.json", {"model_type": "llama", "vocab_size": rows})
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode(f"a{PAD}user")
    assert max(ids) < rows and tokenizer.decode(ids) == f"a{PAD}user"
    assert rows not in tokenizer.eos and tokenizer.vocab == rows
    write_json(folder / "config.json", {"model_type": "llama", "vocab_size": rows + 1})
    assert rows in read_tokenizer(folder).encode(f"a{PAD}")


def test_a_model_stops_at_the_end_of_a_turn(tmp_path):
    """Its metadata name another EOS."""
    folder = write_tiny(tmp_path, eos_token_id=9)
    write_json(folder / "tokenizer_config.json", {})
    assert models.load(folder).eos == (9,)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}" + END + "{% endfor %}"
    )
    assert models.load(folder).eos == (9, 1)


def test_a_bos_is_found_where_the_vocabulary_lacks_letters(tmp_path):
    coder = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "\u4e00": 1}, []))
    coder.add_special_tokens(["<s>"])
    coder.decoder = decoders.Fuse()
    coder.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    coder.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).front == (0,)
