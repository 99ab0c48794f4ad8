"""`jaxkv calibrate`: measure how much of a KV budget each KV head of a model needs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxkv.cli import flags
from jaxkv.cli.files import check_file, print_json, read_text, write
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError

STRONGEST = 12  # KV heads that are printed
FLAGS = (
    ("text", str, None, "FILE", "plain UTF-8 text; - reads standard input (default: the beginning "
     "of a novel that comes with jaxkv)"),
    ("max-tokens", flags.integer(32), None, "N", "read only the first N tokens of the text "
     "(default: 1024, or as many as fit the trained context twice)"),
    ("out", str, None, "FILE.json", "file for calibration=FILE of policies with "
     "budgets=calibrated, in a folder that exists (default: print it)"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, *FLAGS)
    flags.add_json(parser)
    flags.add_model(parser, mesh=False, seed=False)


def check_name(out: Path) -> None:
    """Raise UserError for the name of a file that a policy string could not give."""
    from jaxkv.policies.prompt_compression import head_shares

    name = str(out)
    if set(",;=") & set(name) or name != name.strip() or name == "none":
        raise UserError(
            "--out must be a name that a policy string can have, without comma, ; or =, spaces "
            f"around it, and other than none, got {name!r}; rename it"
        )
    if str(out) in head_shares.shipped():
        raise UserError(
            f"{out} is the name of head shares in the package, which policies would read; write "
            f"{out}.json"
        )


def run(args: argparse.Namespace) -> int:
    text = None if args.text is None else read_text(args.text, "text")
    out = None if args.out is None else Path(args.out)
    if out is not None:
        check_file(out)
        check_name(out)
    llm = flags.load_model(args)
    from jaxkv.models.tools import calibrate
    from jaxkv.models.tools.passage import PASSAGE
    from jaxkv.policies.prompt_compression import head_shares

    text = PASSAGE.read_text("utf-8") if text is None else text
    with Progress("calibrating") as progress:
        result = calibrate.calibrate(llm, text, args.max_tokens, progress.at)
    content = head_shares.write(result)
    if out is not None:
        write(out.parent, {out.name: content.encode()})
    if args.json:
        print_json(json.loads(content))
    elif out is None:
        print(content, end="")
    else:
        strongest = calibrate.strongest(result, STRONGEST)
        heads = ", ".join(f"{head} ({times:.1f})" for head, times in strongest)
        print(f"wrote {out}; use it as retrieval:budgets=calibrated,calibration={out}")
        print(f"KV heads with the largest shares (layer.head, multiple of the mean): {heads}")
    return 0
