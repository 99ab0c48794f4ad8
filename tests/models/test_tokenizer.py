"""Tokenizers: published ids, exact streaming, and refused files."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors, trainers

from jaxkv.errors import UserError
from jaxkv.models.loading.tokenizer import Pieces, Tokenizer, read_tokenizer
from tests.models.folders import write_json

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


def test_sentencepiece_control_tokens(stories, tmp_path):
    shutil.copy(stories / "tokenizer.model", tmp_path)
    write_json(tmp_path / "added_tokens.json", {"<pad>": 512})
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer.encode("Once</s><s>upon<pad>", bos=False)
    assert [i for i in ids if i in (1, 2, 512)] == [2, 1, 512]
    assert tokenizer.vocab == 513 and tokenizer.decode(ids[-1:], special=True) == "<pad>"


def test_encoded_text_decodes_to_itself(tokenizer):
    assert tokenizer.decode(tokenizer.encode("the cat", bos=False)) == "the cat"
    odd = TEXT if tokenizer.strip == 0 else " ".join(TEXT.split(" ")).replace("   ", " ").rstrip()
    assert tokenizer.decode(tokenizer.encode(TEXT)) == odd


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


def test_spaces_between_words_survive(stories):
    tokenizer = read_tokenizer(stories)
    ids = tokenizer.encode("Once upon a time")
    pieces = Pieces(tokenizer)
    assert [pieces.push(i) for i in ids] == ["", "Once", " upon", " a", " time"]
    pieces = Pieces(tokenizer, start=False)
    assert pieces.push(*ids[2:]) == " upon a time"


def test_a_long_stream_costs_the_same_per_token(stories):
    tokenizer = read_tokenizer(stories)
    pieces = Pieces(tokenizer)
    start = time.perf_counter()
    assert sum(len(pieces.push(i)) for i in [403, 407] * 200_000) > 1_000_000
    assert time.perf_counter() - start < 10  # 0.3 s on an idle machine


def test_the_bos_follows_the_post_processor(byte_level, tmp_path):
    plain = read_tokenizer(byte_level)
    assert (plain.bos, plain.adds_bos, plain.eos) == (None, False, (1,))
    assert plain.encode("a", bos=True) == plain.encode("a", bos=False) == plain.encode("a")
    begins = read_tokenizer(with_post_processor(byte_level, tmp_path))
    assert (begins.bos, begins.adds_bos) == (0, True)
    assert begins.encode("a") == [0, *begins.encode("a", bos=False)]


def test_a_bos_is_found_where_the_vocabulary_lacks_letters(tmp_path):
    from tokenizers import Tokenizer, models, processors

    coder = Tokenizer(models.BPE({"<s>": 0, "\u4e00": 1}, []))
    coder.add_special_tokens(["<s>"])
    coder.decoder = decoders.Fuse()
    coder.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    coder.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).front == (0,)


def test_special_tokens_in_text(byte_level):
    tokenizer = read_tokenizer(byte_level)
    ids = tokenizer.encode("<|begin|>the cat<|end|>")
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, special=True) == "<|begin|>the cat<|end|>"


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
