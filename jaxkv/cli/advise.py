"""`jaxkv advise`: measure policies at equal budgets on a text; says which one to take."""

from __future__ import annotations

import argparse

from jaxkv.cli import flags
from jaxkv.cli.files import check_plot, describe, print_json, read_text, write_report
from jaxkv.cli.interrupts import interrupted, note_interrupt
from jaxkv.cli.progress import say, show_progress

FILES = ("advise.json", "advise.png")


FLAGS = (
    ("budget", flags.memory, None, "BYTES", "bytes of the tokens that a sequence caches after the "
     "scored ones, such as 8MiB (default: those of a streaming cache of a quarter of a stretch, at "
     "most 256 tokens, or of the largest --policy)"),
    ("policy", str, None, "P", "policy to measure; may be repeated. A name alone, such as "
     "reservoir, gets the fields that fill the budget; all measures every name, which takes "
     "several times as long (default: streaming in floats and in int8, reservoir, snapkv, "
     "expected-attention, keydiff and uniform)", {"action": "append"}),
    ("max-tokens", flags.integer(2), None, "N", "read only the first N tokens of the text "
     "(default: as many as the stretches need)"),
    ("block", flags.integer(1), None, "N", "scored tokens per block, from which the errors are "
     "computed (default: those of a stretch, or fewer where the text has less than 8 stretches)"),
    ("out", str, None, "FOLDER", f"folder for {' and '.join(FILES)}, created if absent"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_text(parser, "UTF-8 text of the kind that the cache is for")
    flags.add(parser, *FLAGS)
    flags.add_stretches(parser, "448, or less for a model with a short context", "64", "8")
    flags.add_json(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    out = None if args.out is None else check_plot(args.out, FILES)
    from jaxkv.models.tools.budgets import ALL, SHAPES

    named = [policy.strip() for policy in args.policy or []]
    if ALL in named:
        named = [*SHAPES, *(policy for policy in named if policy != ALL)]
    explicit_policies = [policy for policy in named if policy not in SHAPES]
    llm = flags.load_model(args, *explicit_policies)
    from jaxkv.models.generation.score import check_scorable, encode
    from jaxkv.models.tools import advise, advise_report, budgets
    from jaxkv.state.memory import show

    for policy in explicit_policies:
        advise.check_not_full(llm, policy)
    ids = encode(llm, text)[: args.max_tokens]
    parts = advise.cut(llm, ids, args.prompt_tokens, args.score_tokens, args.stretches)
    sizes = parts.prompt, parts.scored
    for policy in explicit_policies:
        check_scorable(llm.policies(policy), parts.prompt)
    budget = args.budget
    if budget is None:
        budget = budgets.budget_of(llm, named, *sizes)
    policies = budgets.fit(llm, budget, named, *sizes)
    advise.check_evicts(llm, policies, parts)
    block = advise.block_of(parts, args.block)
    about = describe("advise", args, llm)
    say(
        f"measures full attention and {len(policies)} other{'s' * (len(policies) > 1)} on "
        f"{len(parts.tokens)} stretches of {parts.fed} tokens; the first time compiles for minutes"
    )
    with note_interrupt() as pressed:
        measured = advise.measure(llm, parts, policies, args.seed, show_progress, pressed.is_set)
    results = advise.rank(llm, parts, measured, budget, block)
    report = about | results
    report |= {"tokens": int(parts.tokens.size), "context": llm.config.context}
    report |= {"interrupted": pressed.is_set()}
    count = sum(row["policy"] != advise.FULL for row in results["policies"])
    if args.json:
        print_json(report)
    elif results["policies"]:
        use = 'generate "Once upon a time"' if llm.chat.template is None else "chat"
        command = f"jaxkv {use}{flags.model_options(args)}"
        sentences = advise_report.sentences(results, command)
        print(advise_report.table(results), "", *sentences, sep="\n")
    if out is not None and count:
        caption = (
            f"{about['model']} on {about['text']}: {len(parts.tokens)} prompts of {parts.prompt:,} "
            f"tokens, caches of at most {show(budget)} per sequence after {parts.scored} more"
        )
        picture = advise_report.draw(results, caption)
        write_report(out, FILES, report, picture)
    if pressed.is_set():
        timed = all(row["milliseconds_per_token"] for row in results["policies"])
        times = "" if timed and count else ", times per token are not"
        return interrupted(f"{count} of {len(policies)} policies are measured{times}")
    return 0
