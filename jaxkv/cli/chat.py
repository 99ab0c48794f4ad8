"""`jaxkv chat`: chat with a model, with one cache for the whole conversation."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxkv.cli import flags
from jaxkv.cli.files import print_json
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt, stop
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError
from jaxkv.files import decode
from jaxkv.policy_spec import format_policy

if TYPE_CHECKING:
    from jaxkv.models import Conversation, Sampling

EXIT = "/exit"
USUAL = (16, 64, 256)  # lengths of messages in tokens, for which programs are compiled at the start


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"Each line of input is a message. {EXIT} or the end of input exits. Ctrl-C stops an "
        "answer; at the prompt it exits."
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    flags.add_policy(parser)
    flags.add_json(parser)
    flags.add_sampling(parser, max_new_tokens=512)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    sampling = flags.sampling_of(args)
    llm, load = flags.open_model(args, args.policy)
    from jaxkv.models import Conversation

    if llm.chat.template is None:
        print(
            "jaxkv: the model has no chat template: messages are sent as plain text",
            file=sys.stderr,
        )
    talk = Conversation(llm, args.policy, args.system, args.seed)
    talk.stream.compile_ahead(USUAL, sampling, () if args.ignore_eos else llm.eos)
    load()  # while programs are compiled
    turns, code = [], 0
    try:
        for line in lines(silent=args.json):
            turns.append(answer(talk, line, sampling, args))
    except KeyboardInterrupt:
        code = INTERRUPTED
        _end_line(silent=args.json)
    if args.json:
        result = {"turns": turns, "state_bytes": talk.stream.state_bytes}
        settings = {"policy": format_policy(talk.stream.policies), "seed": args.seed}
        print_json(result | settings | {"versions": flags.versions()})
    return code


def lines(silent: bool) -> Iterator[str]:
    """The user's messages, one per line, until /exit or the end of input; skips empty lines."""
    if sys.stdin is None:
        raise UserError("standard input is closed, so there are no messages; pipe messages in")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys in `input`)
    while True:
        try:
            with on_interrupt(stop):
                line = input("" if silent else "> ") if sys.stdin.isatty() else _piped()
        except EOFError:
            if sys.stdin.isatty():
                _end_line(silent)
            return
        if line.strip() == EXIT:
            return
        if line.strip():
            yield line


def _piped() -> str:
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    return decode(raw, "standard input").removesuffix("\n").removesuffix("\r")


def answer(
    talk: Conversation, line: str, sampling: Sampling, args: argparse.Namespace
) -> dict[str, object]:
    """Print one answer while it is generated; Ctrl-C ends it, and the conversation continues."""
    with on_interrupt(talk.interrupt):
        pieces = talk.say(line, sampling, args.max_new_tokens, args.stop, args.ignore_eos)
        with Progress("compiling and prefilling"):
            first = next(pieces, "")
        try:
            for piece in itertools.chain([first], pieces):
                if not args.json:
                    print(piece, end="", flush=True)
        finally:
            _end_line(silent=args.json)
    out = talk.output
    return {"user": line, "text": out.text, "tokens": out.tokens, "finish_reason": out.reason}


def _end_line(silent: bool) -> None:
    if not silent:
        print(flush=True)
