"""`jaxkv sinks`: measure how many sinks a model needs, on a text."""

from __future__ import annotations

import argparse

from jaxkv.cli import flags
from jaxkv.cli.files import check_plot, describe, print_json, read_text, write_report
from jaxkv.cli.interrupts import interrupted, note_interrupt
from jaxkv.cli.progress import show_progress

FILES = ("sinks.json", "sinks.png")
FLAGS = (
    ("text", str, None, "FILE", "plain UTF-8 text; - reads standard input (default: the beginning "
     "of a novel that comes with jaxkv)"),
    ("capacity", flags.integer(5), 256, "TOKENS", "tokens in every cache"),
    ("max-tokens", flags.integer(10), 4096, "N", "read only the first N tokens"),
    ("out", str, None, "FOLDER", f"folder for {' and '.join(FILES)}, created if absent"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, *FLAGS)
    flags.add_json(parser)
    flags.add_model(parser, mesh=False)


def run(args: argparse.Namespace) -> int:
    text = None if args.text is None else read_text(args.text, "text")
    out = None if args.out is None else check_plot(args.out, FILES)
    llm = flags.load_model(args)
    from jaxkv.models.generation.score import encode
    from jaxkv.models.tools import sinks
    from jaxkv.models.tools.passage import PASSAGE

    if text is None:
        args.text, text = str(PASSAGE), PASSAGE.read_text("utf-8")
    ids = encode(llm, text)[: args.max_tokens]
    about = describe("sinks", args, llm)
    with note_interrupt() as pressed:
        result = sinks.measure(llm, ids, args.capacity, args.seed, show_progress, pressed.is_set)
    report = about | {"interrupted": pressed.is_set()} | result
    if args.json:
        print_json(report)
    else:
        print(sinks.table(report), "", *sinks.sentences(report, about["model"]), sep="\n")
    if out is not None and result["rows"]:
        source = f"{about['model']} on {about['text']}"
        caption = f"{source}: {len(ids):,} tokens, caches of {args.capacity:,}"
        write_report(out, FILES, report, sinks.draw(report, caption))
    if pressed.is_set():
        return interrupted(f"{len(result['rows'])} of {len(sinks.COUNTS)} caches are measured")
    return 0
