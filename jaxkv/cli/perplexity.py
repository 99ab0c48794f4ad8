"""`jaxkv perplexity`: compute the perplexity of a text under a cache policy."""

from __future__ import annotations

import argparse

from jaxkv.cli import flags
from jaxkv.cli.files import print_json, read_text
from jaxkv.cli.interrupts import interrupted, note_interrupt
from jaxkv.cli.progress import show_progress

BLOCKS = 20  # default number of blocks with a mean loss each


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_scoring(parser)
    flags.add_prompt(parser, "no prompt")
    flags.add_policy(parser)
    flags.add_json(parser)
    flags.add_model(parser)


def add_scoring(
    parser: argparse.ArgumentParser, max_tokens: int | None = None, blocks: int = BLOCKS
) -> None:
    """The flags of a text to score."""
    limit = "the whole file" if max_tokens is None else max_tokens
    flags.add_text(parser)
    flags.add(
        parser,
        (
            "max-tokens",
            flags.integer(2),
            None,
            "N",
            f"score only the first N tokens, including a BOS (default: {limit})",
        ),
        (
            "chunk",
            flags.integer(1),
            None,
            "C",
            "tokens per chunk; results change by rounding alone (default: by policy)",
        ),
        (
            "block",
            flags.integer(1),
            None,
            "N",
            f"report the mean loss of each N tokens (default: {blocks} equal blocks)",
        ),
    )
    parser.set_defaults(max_tokens=max_tokens)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    llm = flags.load_model(args, args.policy)
    from jaxkv.models.generation.score import check_scorable, encode
    from jaxkv.models.tools import compare
    from jaxkv.state.memory import show

    prompt = args.prompt_tokens or 0
    check_scorable(llm.policies(args.policy), prompt)
    text = compare.cut(llm, encode(llm, text)[: args.max_tokens], prompt, None, None)
    with note_interrupt() as pressed:
        scores = compare.compare(
            llm, text, [args.policy], args.chunk, args.seed, show_progress, pressed.is_set
        )
    code = 0
    if pressed.is_set():
        done = scores[args.policy].predictions if scores else 0
        code = interrupted(scored_of(args.policy, done, text.scored))
    if not scores:  # interrupted within the prompt
        return code
    scored = scores[args.policy]
    block = args.block or -(-len(scored.losses) // BLOCKS)
    result = {
        "tokens": text.tokens.size,
        "prompt": prompt,
        "interrupted": pressed.is_set(),
        **compare.result(llm, args.policy, scored, block),
    }
    if args.json:
        print_json(result | {"seed": args.seed, "versions": flags.versions()})
        return code
    predictions = scored.predictions
    print(f"perplexity {scored.perplexity:.4f} (loss {scored.loss:.4f}), {predictions} predictions")
    print(f"policy     {result['policy_string']}, state {show(scored.state_bytes)}")
    print(f"seconds    {scored.seconds:.1f}, and {scored.compile_seconds:.1f} compiling")
    return code


def scored_of(policy: str, done: int, total: int, unscored: int = 0) -> str:
    """What was scored before Ctrl-C. unscored: policies that were not."""
    scored = f"{policy} is scored on the first {done} of {total} predictions"
    return f"{scored}; {unscored} more not scored" if unscored else scored
