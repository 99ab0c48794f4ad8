"""The tokenizer of a data folder: trained on its texts, or that of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Coder
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from jaxkv.errors import UserError
from jaxkv.models.loading.source import open_source
from jaxkv.models.training.data import END, SECOND_SINK, SINK, SPECIAL


def train(texts: Iterator[str], vocab: int) -> Coder:
    """Train a byte-level BPE of `vocab` tokens, including 256 bytes and the special tokens."""
    min_vocab = 256 + len(SPECIAL)
    if vocab < min_vocab:
        raise UserError(
            f"a vocabulary must hold at least {min_vocab} tokens, got {vocab}; choose a larger one"
        )
    coder = Coder(BPE())
    coder.pre_tokenizer = ByteLevel(add_prefix_space=False)
    coder.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    coder.train_from_iterator(texts, trainer)
    if coder.get_vocab_size() < vocab:
        raise UserError(
            f"the texts give only {coder.get_vocab_size()} tokens of BPE, not {vocab}; "
            "choose a smaller vocabulary, or give more text"
        )
    return coder


def take(name: Path | str) -> tuple[Coder, str]:
    """A published tokenizer with the special tokens that it lacks, and the one that ends a text.

    name: a tokenizer.json, or a model, whose documents end with its <|endoftext|>, else its EOS.
    """
    if Path(name).suffix == ".json" or (Path(name).is_file() and Path(name).suffix != ".gguf"):
        try:
            coder, end = Coder.from_file(str(name)), END
        except Exception as error:  # the package raises bare Exception for every bad file
            raise UserError(f"{name} is not a tokenizer.json: {error}; name another") from None
    else:
        coder, end = _of_model(name)
    coder.add_special_tokens(list(dict.fromkeys((end, SINK, SECOND_SINK))))
    coder.no_truncation()
    coder.no_padding()
    return coder, end


def _of_model(name: Path | str) -> tuple[Coder, str]:
    """A copy of a model's tokenizer, and its token that ends a text."""
    source = open_source(name)
    tokenizer = source.tokenizer()
    if tokenizer.backend is None:
        raise UserError(
            f"{source.path} has a SentencePiece tokenizer, which a data folder cannot store; "
            "name a model with a tokenizer.json"
        )
    coder = Coder.from_str(tokenizer.backend.to_str())
    ends = [END] if coder.token_to_id(END) is not None else []
    ends += [coder.id_to_token(i) for i in (*tokenizer.eos, *source.config.eos)]
    if not ends:
        raise UserError(f"{source.path} has no token that ends a text; name another model")
    return coder, ends[0]


def read(path: Path) -> Coder:
    """The tokenizer of a data folder, for its texts: names of special tokens are plain text."""
    coder = Coder.from_file(str(path))
    coder.encode_special_tokens = True
    return coder


def can_cut(coder: Coder) -> bool:
    """Whether the tokens of a text do not change where it is cut before a line end.

    A byte-level BPE has no token from a letter to a line end. Other tokenizers, and a byte-level
    one with `add_prefix_space`, may put a space in front of each piece.
    """
    decoder = "" if coder.decoder is None else coder.decoder.__getstate__().decode()
    pieces = ("The end", "\n\n  of line 1", "\r\nand")
    text_ids, *piece_ids = (
        coder.encode(p, add_special_tokens=False).ids for p in ("".join(pieces), *pieces)
    )
    return "ByteLevel" in decoder and text_ids == [i for ids in piece_ids for i in ids]


def dtype_for(vocab: int, dtype: str) -> np.dtype:
    if dtype == "uint16" and vocab > 2**16:
        raise UserError(
            f"uint16 holds ids up to 65,535, the vocabulary has {vocab:,} tokens; use uint32"
        )
    name = ("uint16" if vocab <= 2**16 else "uint32") if dtype == "auto" else dtype
    return np.dtype(name)
