"""`jaxkv advise`: measure policies at equal budgets on a text; says which one to take."""

from __future__ import annotations

import argparse
import sys
import threading

from jaxkv.cli import flags
from jaxkv.cli.files import print_json, read_text
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
from jaxkv.cli.progress import show_progress
from jaxkv.cli.report import check_plot, describe, write_report

MAX_TOKENS = 4_000  # at most; a shorter trained context, where full attention fails, is the limit
FILES = ("advise.json", "advise.png")


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_text(parser, "UTF-8 text of the kind that the cache is for")
    parser.add_argument(
        "--budget", type=flags.memory, metavar="BYTES",
        help="cache bytes per sequence, such as 8MiB (default: those of a streaming cache of 256 "
        "tokens, or of the largest --policy)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", action="append", metavar="P",
        help="policy to measure; may be repeated. A name alone, such as reservoir, gets the fields "
        "that fill the budget (default: all that `jaxkv advise` knows)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=flags.whole(2), metavar="N",
        help=f"read only the first N tokens (default: {MAX_TOKENS}, or the trained context)",
    )  # fmt: skip
    parser.add_argument(
        "--block", type=flags.whole(1), metavar="N",
        help="tokens per block, from which the errors are computed (default: 30 equal blocks)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FOLDER", help=f"folder for {' and '.join(FILES)}, created if absent"
    )
    flags.add_json(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    out = None if args.out is None else check_plot(args.out, FILES)
    from jaxkv.models.budgets import SHAPES

    named = [policy.strip() for policy in args.policy or []]
    own = [policy for policy in named if policy not in SHAPES]
    llm = flags.load_model(args, *own)
    from jaxkv.models import advise, advise_report, budgets
    from jaxkv.models.score import check_scorable, encode
    from jaxkv.state.memory import show

    for policy in own:
        check_scorable(llm.policies(policy))
        advise.check_not_full(llm, policy)
    limit = args.max_tokens or min(MAX_TOKENS, llm.config.context)
    tokens = encode(llm, text)[:limit]
    budget = args.budget
    if budget is None:
        budget = budgets.budget_of(llm, named, len(tokens))
    policies = budgets.fit(llm, budget, named, len(tokens))
    first = advise.first_counted(llm, policies, len(tokens), args.block)
    about = describe("advise", args, llm)
    pressed = threading.Event()
    with on_interrupt(pressed.set):
        readings = advise.measure(llm, tokens, policies, args.seed, show_progress, pressed.is_set)
    results = advise.rank(llm, tokens, readings, first, args.block)
    report = about | results
    report |= {"budget": budget, "tokens": len(tokens), "context": llm.config.context}
    report["interrupted"] = pressed.is_set()
    measured = sum(row["policy"] != advise.FULL for row in results["policies"])
    if args.json:
        print_json(report)
    elif results["policies"]:
        use = 'generate "Once upon a time"' if llm.chat.template is None else "chat"
        command = f"jaxkv {use}{flags.model_options(args)}"
        sentences = advise_report.sentences(results, command)
        print(advise_report.table(results), "", *sentences, sep="\n")
    if out is not None and measured:
        caption = (
            f"{about['model']} on {about['text']}: {len(tokens):,} tokens, "
            f"caches of at most {show(budget)} per sequence"
        )
        picture = advise_report.draw(results, caption)
        write_report(out, FILES, report, picture)
    if pressed.is_set():
        timed = all(row["milliseconds_per_token"] for row in results["policies"])
        times = "" if timed and measured else ", times per token are not"
        done = f"{measured} of {len(policies)} policies are measured{times}"
        print(f"jaxkv: interrupted: {done}", file=sys.stderr)
        return INTERRUPTED
    return 0
