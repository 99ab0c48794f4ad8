"""`jaxkv compare`: score several policies on one text; prints a table and draws a plot."""

from __future__ import annotations

import argparse

from jaxkv.cli import flags
from jaxkv.cli.files import check_plot, describe, print_json, read_text, write_report
from jaxkv.cli.interrupts import interrupted, note_interrupt
from jaxkv.cli.perplexity import add_scoring, scored_of
from jaxkv.cli.progress import show_progress

MAX_TOKENS = 20_000  # as in Figure 3 of StreamingLLM
BLOCKS = 50
FILES = ("compare.json", "compare.png")


FLAGS = (
    ("policy", str, None, "P", "policy to compare; may be repeated. recompute:window=W recomputes "
     "the last W tokens for every token (default: full, and a window and a streaming cache of 256 "
     "tokens)", {"action": "append"}),
    ("out", str, None, "DIR", f"folder for {' and '.join(FILES)}, created if absent"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_scoring(parser, MAX_TOKENS, BLOCKS)
    flags.add_stretches(parser, "no prompt", "all after the prompt", "1")
    flags.add(parser, *FLAGS)
    flags.add_json(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    out = None if args.out is None else check_plot(args.out, FILES)
    from jaxkv.models.tools import recompute

    chosen = args.policy or []
    llm = flags.load_model(args, *(p for p in chosen if recompute.window_of(p) is None))
    from jaxkv.models.generation.score import check_scorable, encode
    from jaxkv.models.tools import compare

    chosen = chosen or compare.defaults(llm.config.context)
    prompt = args.prompt_tokens or 0
    for policy in chosen:  # check all policies before minutes of work on the first
        if recompute.window_of(policy) is None:
            check_scorable(llm.policies(policy), prompt)
    about = describe("compare", args, llm)
    tokens = encode(llm, text)[: args.max_tokens]
    parts = compare.cut(llm, tokens, prompt, args.score_tokens, args.stretches)
    total = len(parts.tokens) * parts.scored
    with note_interrupt() as pressed:
        scores = compare.compare(
            llm, parts, chosen, args.chunk, args.seed, show_progress, pressed.is_set
        )
    if not scores:  # interrupted within the first prompt
        return interrupted(scored_of(chosen[0], 0, total, len(chosen) - 1))
    block = args.block or -(-parts.scored // BLOCKS)
    over = compare.over_first(scores, block)
    results = [
        compare.result(llm, policy, score, block, over=over[policy])
        for policy, score in scores.items()
    ]
    report = about | {
        "policies": results,
        "tokens": parts.tokens.size,
        "stretches": len(parts.tokens),
        "prompt": parts.prompt,
        "interrupted": pressed.is_set(),
        "context": llm.config.context,
        "block": block,
    }
    if args.json:
        print_json(report)
    else:
        print(compare.table(results))
    if out is not None:
        source = f"{about['model']} on {about['text']}"
        caption = f"{source}: {parts.tokens.size:,} tokens, mean loss of {block} consecutive tokens"
        picture = compare.draw(results, llm.config.context, caption)
        write_report(out, FILES, report, picture)
    if pressed.is_set():
        last, score = list(scores.items())[-1]
        unscored = len(chosen) - len(scores)
        return interrupted(scored_of(last, score.predictions, total, unscored))
    return 0
