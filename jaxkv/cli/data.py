"""`jaxkv data`: tokenize texts into the shards that `jaxkv pretrain` reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxkv.cli import flags
from jaxkv.cli.files import check_folder, print_json
from jaxkv.cli.progress import Progress, show_phases


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", nargs="+", required=True, metavar="FILES_OR_FOLDER",
        help="files and folders: .txt (one document each), .jsonl, .jsonl.gz (a document a line) "
        "and .parquet (a document a row)",
    )  # fmt: skip
    parser.add_argument(
        "--valid", nargs="+", default=[], metavar="FILES_OR_FOLDER",
        help="texts of the validation split (default: a share of --text, chosen by hash)",
    )  # fmt: skip
    parser.add_argument(
        "--column", default="text", metavar="NAME",
        help="field of JSON lines, and column of Parquet files, with the text (default text)",
    )  # fmt: skip
    parser.add_argument(
        "--valid-share", type=flags.number, default=0.02, metavar="F",
        help="fraction of the documents in the validation split, without --valid (default 0.02)",
    )  # fmt: skip
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--vocab-size", type=flags.integer(1), metavar="N",
        help="train a byte-level BPE tokenizer with N tokens on the training texts",
    )  # fmt: skip
    tokenizer.add_argument(
        "--tokenizer", metavar="MODEL_OR_FILE",
        help="use the tokenizer of a model (a folder, Hub id, GGUF file or smollm2-135m), as "
        "`jaxkv pretrain --from MODEL` needs it, or an existing tokenizer.json",
    )  # fmt: skip
    parser.add_argument(
        "--token-dtype", choices=("auto", "uint16", "uint32"), default="auto",
        help="integer type of the shards (auto: uint16 if all token ids fit, else uint32)",
    )  # fmt: skip
    parser.add_argument(
        "--remove", metavar="PATTERN",
        help="regular expression; its matches are removed from the texts (_italics_: --remove _)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=flags.integer(1), metavar="N",
        help="processes that tokenize (default: one per core); the result does not depend on it",
    )  # fmt: skip
    parser.add_argument(
        "--out", required=True, metavar="DIR",
        help="folder for the shards and manifest.json, created if absent; the same command resumes "
        "an interrupted run",
    )  # fmt: skip
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    out = check_folder(args.out, ())
    with Progress("loading"):
        from jaxkv.models.network.device import cores
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
            args.processes or cores(),
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
