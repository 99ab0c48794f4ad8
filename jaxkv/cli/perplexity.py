"""`jaxkv perplexity`: compute the perplexity of a text under a cache policy."""

from __future__ import annotations

import argparse
import sys
import threading

from jaxkv.cli import flags
from jaxkv.cli.files import print_json, read_text
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
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
    default = "the whole file" if max_tokens is None else max_tokens
    flags.add_text(parser)
    parser.add_argument(
        "--max-tokens", type=flags.integer(2), default=max_tokens, metavar="N",
        help=f"score only the first N tokens, including a BOS (default: {default})",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", type=flags.integer(1), metavar="C",
        help="tokens per chunk; changes only the speed (default: by policy)",
    )  # fmt: skip
    parser.add_argument(
        "--block", type=flags.integer(1), metavar="N",
        help=f"report the mean loss of each N tokens (default: {blocks} equal blocks)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    llm = flags.load_model(args, args.policy)
    from jaxkv.models.generation.score import encode, score
    from jaxkv.policy_spec import format_policy
    from jaxkv.state.memory import show

    tokens = encode(llm, text)[: args.max_tokens]
    prompt = args.prompt_tokens or 0
    pressed, total = threading.Event(), len(tokens) - 1 - prompt
    with Progress("scoring", total) as progress, on_interrupt(pressed.set):
        scored = score(
            llm, tokens, args.policy, args.chunk, args.seed, progress.at, pressed.is_set, prompt
        )
    code = INTERRUPTED if pressed.is_set() else 0
    if code:
        say_interrupted(args.policy, len(scored.losses), total)
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


def say_interrupted(policy: str, done: int, total: int, unscored: int = 0) -> None:
    """Say in one line what was scored before Ctrl-C. unscored: policies that were not."""
    scored = f"{policy} is scored on the first {done} of {total} predictions"
    rest = f"; {unscored} more not scored" if unscored else ""
    print(f"jaxkv: interrupted: {scored}{rest}", file=sys.stderr)
