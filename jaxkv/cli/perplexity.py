"""`jaxkv perplexity`: compute the perplexity of a text under a cache policy."""

from __future__ import annotations

import argparse

from jaxkv.cli import flags
from jaxkv.cli.files import print_json, read_text
from jaxkv.cli.interrupts import interrupted, note_interrupt
from jaxkv.cli.progress import Progress

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
        ("max-tokens", flags.integer(2), None, "N", "score only the first N tokens, including a "
         f"BOS (default: {limit})"),
        ("chunk", flags.integer(1), None, "C", "tokens per chunk; changes only the speed (default: "
         "by policy)"),
        ("block", flags.integer(1), None, "N", "report the mean loss of each N tokens (default: "
         f"{blocks} equal blocks)"),
    )  # fmt: skip
    parser.set_defaults(max_tokens=max_tokens)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    llm = flags.load_model(args, args.policy)
    from jaxkv.models.generation.score import encode, score
    from jaxkv.policy_spec import format_policy
    from jaxkv.state.memory import show

    tokens = encode(llm, text)[: args.max_tokens]
    prompt = args.prompt_tokens or 0
    total = len(tokens) - 1 - prompt
    with Progress("scoring", total) as progress, note_interrupt() as pressed:
        scored = score(
            llm, tokens, args.policy, args.chunk, args.seed, progress.at, pressed.is_set, prompt
        )
    code = 0
    if pressed.is_set():
        code = interrupted(scored_of(args.policy, len(scored.losses), total))
    result = {
        "perplexity": scored.perplexity,
        "loss": scored.loss,
        "tokens": len(tokens),
        "prompt": prompt,
        "predictions": len(scored.losses),
        "interrupted": pressed.is_set(),
        "policy": format_policy(llm.policies(args.policy)),
        "state_bytes": scored.state_bytes,
        "chunk": scored.chunk,
        "seconds": scored.seconds,
        "compile_seconds": scored.compile_seconds,
        "blocks": scored.blocks(args.block or -(-len(scored.losses) // BLOCKS)),
    }
    if args.json:
        print_json(result | {"seed": args.seed, "versions": flags.versions()})
        return code
    predictions = result["predictions"]
    print(f"perplexity {scored.perplexity:.4f} (loss {scored.loss:.4f}), {predictions} predictions")
    print(f"policy     {result['policy']}, state {show(scored.state_bytes)}")
    print(f"seconds    {scored.seconds:.1f}, and {scored.compile_seconds:.1f} compiling")
    return code


def scored_of(policy: str, done: int, total: int, unscored: int = 0) -> str:
    """What was scored before Ctrl-C. unscored: policies that were not."""
    scored = f"{policy} is scored on the first {done} of {total} predictions"
    return f"{scored}; {unscored} more not scored" if unscored else scored
