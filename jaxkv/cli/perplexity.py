"""`jaxkv perplexity`: how well a model predicts a text under a cache policy."""

from __future__ import annotations

import argparse
import math
import time

from jaxkv.cli import flags
from jaxkv.cli.files import print_json, read_text
from jaxkv.cli.progress import Progress

BLOCKS = 20  # blocks of the text that are told apart, by default


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_text(parser)
    flags.add_policy(parser)
    flags.add_json(parser)
    flags.add_model(parser)


def add_text(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """Which text, and how it is read."""
    told = "the whole file" if max_tokens is None else max_tokens
    parser.add_argument("--text", metavar="FILE", required=True, help="a UTF-8 text; - is stdin")
    parser.add_argument(
        "--max-tokens", type=flags.whole(2), default=max_tokens, metavar="N",
        help=f"the first N tokens, a BOS in front among them (default: {told})",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", type=flags.whole(1), default=512, metavar="C",
        help="tokens read at a time; changes nothing but the speed (default 512)",
    )  # fmt: skip
    parser.add_argument(
        "--block", type=flags.whole(1), metavar="N",
        help=f"tokens whose losses are averaged together (default: {BLOCKS} blocks)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    llm = flags.load_model(args, args.policy)
    import numpy as np

    from jaxkv.memory import show
    from jaxkv.stack import spell
    from models.compilation import clock
    from models.decoding import Stream
    from models.score import encode, losses, mean_by_block
    from models.text import warn_beyond_context

    tokens = encode(llm, text)[: args.max_tokens]
    stream = Stream(llm, args.policy, seed=args.seed, tokens=len(tokens))
    warn_beyond_context(llm, stream.policies, len(tokens))
    begun, compiled = time.perf_counter(), clock().seconds
    done: list[np.ndarray] = []
    with Progress("reading", len(tokens) - 1) as progress:
        for part in losses(llm, tokens, chunk=args.chunk, stream=stream):
            done.append(part)
            progress.at(progress.done + len(part))
    compiled = clock().seconds - compiled
    seconds = time.perf_counter() - begun - compiled
    every = np.concatenate(done).astype(np.float64)
    loss = float(every.mean())
    result = {
        "perplexity": math.exp(loss),
        "loss": loss,
        "tokens": len(tokens),
        "predictions": len(every),
        "policy": spell(stream.policies),
        "state_bytes": stream.state_bytes,
        "seconds": seconds,
        "compile_seconds": compiled,
        "blocks": mean_by_block(every, args.block or -(-len(every) // BLOCKS)),
    }
    if args.json:
        print_json(result | {"seed": args.seed, "versions": flags.versions()})
        return 0
    print(f"perplexity {result['perplexity']:.4f} (loss {loss:.4f}) over {len(every)} predictions")
    print(f"policy     {result['policy']}, state {show(stream.state_bytes)}")
    print(f"seconds    {seconds:.1f}, and {compiled:.1f} compiling")
    return 0
