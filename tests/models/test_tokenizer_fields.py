"""Fields of tokenizer_config.json and of GGUF headers: applied, or refused by name."""

from __future__ import annotations

import inspect

import gguf as package
import pytest
from gguf import TokenType as Kind
from tokenizers import processors

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.loading import gguf
from jaxkv.models.loading.gguf import tokenizer as gguf_tokenizer
from jaxkv.models.loading.hf import tokenizer_config
from jaxkv.models.loading.tokenizer import read_tokenizer
from tests.models.folders import write_json
from tests.models.tokenizer_files import (
    WORDS,
    sentencepiece_vocabulary,
    write_byte_level,
    write_gguf,
    write_sentencepiece,
)
from tests.tiny import END, write_tiny

M = "<|im_start|>"
NEXT = len(sentencepiece_vocabulary({})[0])
TEXT = f"</s> user{M}user"
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
    assert changed.encode(TEXT) != plain.encode(TEXT)


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


BEGINS = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", len(WORDS))])


# A GGUF file has the field as its converter found it: in tokenizer_config.json, else by the
# post-processor.
@pytest.mark.parametrize("post_processor", [None, BEGINS])
@pytest.mark.parametrize("says", [None, True, False])
def test_a_folder_and_a_gguf_file_begin_alike(says, post_processor, tmp_path):
    config = {"bos_token": "<s>"} | ({} if says is None else {"add_bos_token": says})
    parts = {} if post_processor is None else {"post_processor": post_processor}
    folder = read_tokenizer(write_byte_level(tmp_path / "a", ["<s>"], config, **parts))
    adds = says if says is not None else post_processor is not None
    file = gguf.read_tokenizer(
        write_gguf(tmp_path / "m.gguf", "gpt2", {"<s>": Kind.CONTROL}, bos_token_id=len(WORDS),
                   add_bos_token=adds)
    )  # fmt: skip
    assert folder.encode("a") == file.encode("a") and (folder.front == (len(WORDS),)) is adds
    assert folder.bos == file.bos == len(WORDS)


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
