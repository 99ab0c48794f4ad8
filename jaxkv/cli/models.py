"""`jaxkv models`: list the model families that jaxkv runs."""

from __future__ import annotations

import argparse

from jaxkv.cli import flags
from jaxkv.cli.files import print_json

NOTE = """\
A family is chosen by `architectures` in config.json. Of models that read pictures too, the text
part is read. `jaxkv policies --model M` shows the layers of a model and their caches. Small random
models of each family were compared with transformers: docs/models.md has the differences."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from jaxkv.models.tools.families import FAMILY_ROWS

    if args.json:
        extra = ("architectures", "gguf", "trained")
        rows = [row._asdict() | {name: getattr(row, name) for name in extra} for row in FAMILY_ROWS]
        print_json({"families": rows})
        return 0
    width = max(len(row.name) for row in FAMILY_ROWS)
    for row in FAMILY_ROWS:
        also = [text for text, has in (("GGUF", row.gguf), ("training", row.trained)) if has]
        ways = f" ({', '.join(also)})" if also else ""
        print(f"{row.name:{width}}  {row.models}{ways}")
        print(f"{'':{width}}  beyond Llama: {row.beyond.replace('`', '')}")
    print(f"\n{NOTE}")
    return 0
