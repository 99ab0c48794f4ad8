"""Small tokenizers in the published shapes, as folders and as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from gguf import TokenType as Kind
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxkv.models.loading.gguf.header import Header
from jaxkv.models.loading.sentencepiece import serialise
from tests.models.folders import write_json
from tests.models.gguf.files import written

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Words that span "user", "system" and letters beside marks, so that a lost or an extra space shows.
MERGES = ["u s", "e r", "us er", "Ġ user", "s y", "Ġ a", "i m", "< |", "| >", "Ċ Ċ"]
WORDS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]


def write_byte_level(
    folder: Path,
    added: Sequence[AddedToken | str],
    config: Mapping[str, Any] | None = None,
    add_prefix_space: bool = False,
    **parts: Any,
) -> Path:
    """A folder with a byte-level tokenizer.json.

    added: a text is a special token. config: tokenizer_config.json. parts: of the tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {word: i for i, word in enumerate(WORDS)}
    coder = tokenizers.Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in MERGES]))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    coder.decoder = decoders.ByteLevel()
    for token in added:
        coder.add_special_tokens([token]) if isinstance(token, str) else coder.add_tokens([token])
    for name, value in parts.items():
        setattr(coder, name, value)
    coder.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(config or {})
    write_json(folder / "tokenizer_config.json", fields)
    write_json(folder / "config.json", {"model_type": "llama"})
    return folder


def write_unigram(folder: Path, added: Sequence[str]) -> Path:
    """A folder with a Unigram tokenizer.json, whose vocabulary has the added tokens, too."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [(letter, -9.0) for letter in "▁userymaitnb<>|/[]INST_xd"]
    vocab = [("<unk>", 0.0), *((text, 0.0) for text in added), *letters]
    coder = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    coder.pre_tokenizer = pre_tokenizers.Metaspace()
    coder.decoder = decoders.Metaspace()
    coder.add_special_tokens(list(added))
    coder.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return folder


def write_llama_2(folder: Path, mark: AddedToken) -> Path:
    """A folder with a tokenizer.json whose normalizer puts a space before a text."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["<unk>", "<s>", "</s>", *BYTES, *dict.fromkeys(PIECES)]
    merges = [("u", "s"), ("e", "r"), ("us", "er"), ("▁", "user"), ("▁", "a"), ("s", "y"),
              ("i", "m"), ("▁", "▁")]  # fmt: skip
    coder = tokenizers.Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    coder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    coder.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    coder.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    coder.add_tokens([mark])
    coder.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
              "unk_token": "<unk>"}  # fmt: skip
    write_json(folder / "tokenizer_config.json", fields)
    write_json(folder / "config.json", {"model_type": "llama"})
    return folder


BYTES = [f"<0x{i:02X}>" for i in range(256)]
# Pieces in the order of their merges.
PIECES = ["er", "us", "user", "▁user", "▁a", "sy", "im", "▁▁", *"▁userymaitnb<>|/[]INST_xd", "\n"]


def sentencepiece_vocabulary(
    marks: Mapping[str, int], byte_pieces: Sequence[str] = BYTES
) -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types; marks: text -> type, after the three control pieces."""
    words = list(dict.fromkeys(PIECES))
    pieces = ["<unk>", "<s>", "</s>", *marks, *byte_pieces, *words]
    scores = [0.0] * (len(pieces) - len(words)) + [-float(i) for i, _ in enumerate(words)]
    types = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, *marks.values()]
    types += [Kind.BYTE] * len(byte_pieces)
    return pieces, scores, [int(kind) for kind in types + [Kind.NORMAL] * len(words)]


def write_sentencepiece(
    folder: Path,
    marks: Mapping[str, int],
    config: Mapping[str, Any] | None = None,
    added: Mapping[str, int] | None = None,
    byte_pieces: Sequence[str] = BYTES,
) -> Path:
    """A folder with a tokenizer.model only; added: added_tokens.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model = serialise(*sentencepiece_vocabulary(marks, byte_pieces), True)
    (folder / "tokenizer.model").write_bytes(model)
    fields = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
              "unk_token": "<unk>"} | dict(config or {})  # fmt: skip
    write_json(folder / "tokenizer_config.json", fields)
    write_json(folder / "config.json", {"model_type": "llama"})
    if added:
        write_json(folder / "added_tokens.json", added)
    return folder


def write_gguf(
    path: Path,
    kind: str,
    marks: Mapping[str, int],
    pre: str = "gpt-2",
    byte_pieces: Sequence[str] = BYTES,
    **fields: Any,
) -> Header:
    """The header of a GGUF file with the vocabulary of a folder above; kind: gpt2 or llama."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(kind)
        if kind == "gpt2":
            tokens = [*WORDS, *marks]
            types = [int(Kind.NORMAL)] * len(WORDS) + list(map(int, marks.values()))
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges(MERGES)
        else:
            tokens, scores, types = sentencepiece_vocabulary(marks, byte_pieces)
            writer.add_token_scores(scores)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        for name, value in fields.items():
            getattr(writer, f"add_{name}")(value)

    return written(path, fill)
