"""`jaxkv compact`: train a few keys and values per layer that replace a document."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from jaxkv.cli import flags
from jaxkv.cli.files import check_file, print_json, read_text, unwritable
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError

SLOTS, STEPS = 64, 300
SUFFIX = ".safetensors"


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_text(parser)
    parser.add_argument(
        "--slots", type=flags.integer(2), default=SLOTS, metavar="P",
        help=f"keys and values per layer and KV head (default {SLOTS})",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=flags.integer(1), default=STEPS, metavar="N",
        help=f"steps of training (default {STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar=f"FILE{SUFFIX}", required=True,
        help="the file to write, in a folder that exists, which other commands take as --sinks",
    )  # fmt: skip
    flags.add_json(parser)
    flags.add_model(parser, mesh=False, sinks=False)


def run(args: argparse.Namespace) -> int:
    text, out = read_text(args.text, "text"), Path(args.out)
    if out.suffix != SUFFIX:
        raise UserError(f"--out must be a file that ends in {SUFFIX}, got {args.out!r}; rename it")
    check_file(out)
    llm, load = flags.open_model(args)
    from jaxkv.models import compaction, sinks
    from jaxkv.models.published import open_published
    from jaxkv.models.score import encode

    document = encode(llm, text)
    compaction.check(llm, document, args.slots)
    load()
    pressed, start, losses = threading.Event(), time.perf_counter(), []
    with Progress("training", args.steps, "steps") as progress, on_interrupt(pressed.set):

        def watch(step: int, loss: float) -> None:
            losses.append(loss)
            progress.at(step)

        pairs = compaction.compact(
            llm, document, args.slots, args.steps, seed=args.seed, progress=watch,
            stopped=pressed.is_set,
        )  # fmt: skip
    if pairs is None:
        print(f"jaxkv: interrupted after {len(losses)} of {args.steps} steps: no file is written",
              file=sys.stderr)  # fmt: skip
        return INTERRUPTED
    try:
        fingerprint = open_published(llm.path).fingerprint()
        sinks.write(out, pairs.weights, llm.config.layers, fingerprint)
    except OSError as error:
        raise unwritable(out.parent, error) from None
    report = {
        "memory": str(out),
        "bytes": out.stat().st_size,
        "tokens": len(document),
        "slots": args.slots,
        "steps": args.steps,
        "first_loss": losses[0],
        "loss": losses[-1],
        "seconds": time.perf_counter() - start,
    }
    if args.json:
        print_json(report | {"seed": args.seed, "versions": flags.versions()})
    else:
        print(f"wrote {out}: {args.slots} slots for {len(document):,} tokens; KL to full attention "
              f"{losses[0]:.3f} before training, {losses[-1]:.3f} at the end (nats)")  # fmt: skip
    return 0
