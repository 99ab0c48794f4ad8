"""`jaxkv view`: write a web page that shows what is cached and where attention goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxkv.cli import flags
from jaxkv.cli.files import check_file, names, print_json, read_text, write
from jaxkv.cli.interrupts import interrupted, note_interrupt
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError

TOKENS = 256
POLICY = "streaming:sinks=4,window=60"
OUT = "view.html"


def _layers(text: str) -> list[int]:
    """The type of --layers."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers such as 0,1,29, got {text!r}")
    return [int(part) for part in parts]


FLAGS = (
    ("max-tokens", flags.integer(2), TOKENS, "N", "show only the first N tokens, 2000 at most"),
    ("prompt-tokens", flags.integer(1), None, "P", "tokens after which prefill ends, for policies "
     "that act there (default: half of them)"),
    ("layers", _layers, None, "0,1,...", "show only these layers, so that more tokens fit on the "
     "page (default: all)"),
    ("out", str, OUT, "FILE.html", "the page to write, in a folder that exists"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_text(parser)
    flags.add_policy(parser, POLICY)
    flags.add(parser, *FLAGS)
    flags.add_json(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text, "text")
    out = Path(args.out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out must be a file that ends in .html, got {args.out!r}; rename it")
    check_file(out)
    llm, load = flags.open_model(args, args.policy)
    from jaxkv.models.generation.score import encode
    from jaxkv.models.tools import view
    from jaxkv.state.memory import show

    tokens = encode(llm, text)[: args.max_tokens]
    prompt = args.prompt_tokens or -(-len(tokens) // 2)
    if prompt > len(tokens):
        raise UserError(
            f"--prompt-tokens must be at most the {len(tokens)} tokens that are shown, got "
            f"{prompt}; give fewer, a longer text or more --max-tokens"
        )
    view.check(llm, args.policy, len(tokens), prompt, args.layers)
    load()
    with Progress("reading", len(tokens)) as progress, note_interrupt() as pressed:
        recording = view.record(
            llm, tokens, args.policy, prompt, args.layers, args.seed, progress.at, pressed.is_set
        )
    page = view.page(llm, recording, **names(args, llm)).encode()
    write(out.parent, {out.name: page})
    result = {
        "page": str(out),
        "bytes": len(page),
        "tokens": len(recording.ids),
        "policy": recording.policy,
        "layers": list(recording.layers),
        "prompt_tokens": recording.prompt,
        "interrupted": pressed.is_set(),
    }
    if args.json:
        print_json(result | {"seed": args.seed, "versions": flags.versions()})
    else:
        print(f"wrote {out} ({show(len(page))}, {len(recording.ids)} tokens); open it in a browser")
    if pressed.is_set():
        return interrupted(f"the page shows the first {len(recording.ids)} of {len(tokens)} tokens")
    return 0
