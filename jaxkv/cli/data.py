"""`jaxkv data`: tokenize texts into the shards that `jaxkv pretrain` reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxkv.cli import flags
from jaxkv.cli.files import check_folder, print_json
from jaxkv.cli.progress import Progress, show_phases

TEXTS = (
    ("text", str, None, "FILES_OR_FOLDER", "files and folders: .txt (one document each), .jsonl, "
     ".jsonl.gz (a document a line) and .parquet (a document a row)",
     {"nargs": "+", "required": True}),
    ("valid", str, [], "FILES_OR_FOLDER", "texts of the validation split (default: a share of "
     "--text, chosen by hash)", {"nargs": "+"}),
    ("column", str, None, "NAME", "field of JSON lines, and column of Parquet files, with the "
     "text (default: text)"),
    ("valid-share", flags.number, None, "F", "fraction of the documents in the validation split, "
     "without --valid (default: 0.02)"),
)  # fmt: skip
TOKENIZERS = (
    ("vocab-size", flags.integer(1), None, "N", "train a byte-level BPE tokenizer with N tokens on "
     "the training texts"),
    ("tokenizer", str, None, "MODEL_OR_FILE", "use the tokenizer of a model (a folder, Hub id, "
     "GGUF file or smollm2-135m), as `jaxkv pretrain --from MODEL` needs it, or an existing "
     "tokenizer.json"),
)  # fmt: skip
FLAGS = (
    ("token-dtype", str, "auto", None, "integer type of the shards; auto: uint16 if all token ids "
     "fit, else uint32", {"choices": ("auto", "uint16", "uint32")}),
    ("remove", str, None, "PATTERN", "regular expression; its matches are removed from the texts "
     "(_italics_: --remove _)"),
    ("out", str, None, "DIR", "folder for the shards and manifest.json, created if absent",
     {"required": True}),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, *TEXTS)
    flags.add(parser.add_mutually_exclusive_group(required=True), *TOKENIZERS)
    flags.add(parser, *FLAGS)
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    out = check_folder(args.out, ())
    with Progress("loading"):
        from jaxkv.models.training import corpus, data
    with show_phases("bytes") as progress:
        tokens = corpus.prepare(
            [Path(text) for text in args.text],
            out,
            args.vocab_size,
            args.tokenizer,
            [Path(text) for text in args.valid],
            args.valid_share,
            args.token_dtype,
            args.remove,
            args.column,
            progress,
        )
    report = {
        "vocab": tokens.vocab,
        "dtype": tokens.manifest["dtype"],
        "documents": sum(tokens.documents(split) for split in data.SPLITS),
        **{f"{split}_tokens": tokens.count(split) for split in data.SPLITS},
    }
    if args.json:
        print_json(report)
        return 0
    print(
        f"{report['documents']} documents, {report['train_tokens']:,} tokens to train on, "
        f"{report['valid_tokens']:,} in the validation split; "
        f"vocabulary of {report['vocab']:,} in {report['dtype']}"
    )
    return 0
