"""`jaxkv chat`: chat with a model, with one cache for the whole conversation."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator

from jaxkv import defaults
from jaxkv.cli import flags
from jaxkv.cli.chat_commands import (
    EXIT,
    ChatState,
    check_session,
    load_session,
    obey,
    save_session,
)
from jaxkv.cli.files import print_json
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt, send_again, stop
from jaxkv.cli.progress import Progress, say
from jaxkv.errors import UserError
from jaxkv.files import decode


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"Each line of input is a message; a line that begins with / is a command: /help lists "
        f"them, // begins a message with /. {EXIT} or the end of input exits. Ctrl-C stops an "
        "answer, or /policy while it compiles; at the prompt it exits."
    )
    session = "continue the conversation in this file, if it exists, and save it there after each "
    flags.add(
        parser,
        ("system", str, None, "TEXT", "the system message"),
        ("session", str, None, "FILE", f"{session}line"),
    )
    flags.add_policy(parser)
    parser.set_defaults(policy=None)  # of the session, if there is one
    flags.add_json(parser)
    flags.add_sampling(parser, max_new_tokens=512)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    chosen, path = args.policy, args.session
    continues = path is not None and os.path.exists(os.path.expanduser(path))
    if continues:
        check_system(args, path)
    llm, load = flags.open_model(args, *([] if chosen is None else [chosen]))
    args.policy = check_session(path, llm, chosen) if continues else chosen or defaults.POLICY
    sampling = flags.sampling_of(args, llm)
    if llm.chat.template is None:
        say("the model has no chat template: messages are sent as plain text")
    chat = ChatState(args, llm, sampling)
    chat.talk.compile_ahead(sampling, args.ignore_eos)
    load()  # while programs are compiled
    first_talk = chat.talk
    if continues:
        say(load_session(chat, path))
    elif path is not None:
        save_session(chat, path)  # a file that cannot be written ends the chat now
    chat.warm_up(first_talk)
    flags.report_unusable_cache(args, llm)
    turns, code = [], 0
    try:
        for line in lines(silent=args.json):
            begin = line.lstrip()[:2]
            if begin.startswith("/") and begin != "//":
                with on_interrupt(stop):
                    obey(chat, line.strip())
            else:
                message = line.lstrip()[1:] if begin == "//" else line
                try:
                    turns.append(answer(chat, message))
                except UserError as error:
                    if not sys.stdin.isatty():
                        raise
                    say(f"error: {error}; or begin an empty conversation with /reset")
            if args.session is not None:
                keep(chat)
    except KeyboardInterrupt:
        code = INTERRUPTED
        _end_line(silent=args.json)
    if args.json:
        result = {"turns": turns, "state_bytes": chat.talk.stream.state_bytes}
        settings = {"policy": chat.written_policy, "seed": args.seed}
        settings |= {"sampling": vars(sampling), "versions": flags.versions()}
        print_json(result | settings)
    return code


def check_system(args: argparse.Namespace, path: str) -> None:
    """Raise UserError for a file that is no session, or one with another system message."""
    from jaxkv.models.generation import session

    first, *_ = *session.read_notes(path)["messages"], {"role": ""}
    system = first["content"] if first["role"] == "system" else None
    if args.system is not None and args.system != system:
        raise UserError(
            f"a session continues with its own system message: {path} has "
            f"{repr(system)[:60] if system else 'none'}, --system is {args.system!r:.60}; "
            "leave --system out"
        )


def keep(chat: ChatState) -> None:
    """Write the conversation to the file of --session; the chat goes on if that fails."""
    try:
        save_session(chat, chat.args.session)
    except UserError as error:
        say(f"error: {error}")


def lines(silent: bool) -> Iterator[str]:
    """The user's messages, one per line, until /exit or the end of input; skips empty lines."""
    if sys.stdin is None:
        raise UserError("standard input is closed, so there are no messages; pipe messages in")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys in `input`)
    while True:
        try:
            with on_interrupt(stop), send_again():
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


def answer(chat: ChatState, line: str) -> dict[str, object]:
    """Print one answer while it is generated; Ctrl-C ends it, and the conversation continues."""
    args, talk = chat.args, chat.talk
    with on_interrupt(talk.interrupt):
        pieces = talk.say(line, chat.sampling, args.max_new_tokens, args.stop, args.ignore_eos)
        with Progress("prefilling"):
            first = next(pieces, "")
        try:
            for piece in itertools.chain([first], pieces):
                if not args.json:
                    print(piece, end="", flush=True)
        finally:
            _end_line(silent=args.json)
    if not args.json:
        print(chat.status, file=sys.stderr, flush=True)
    out = talk.output
    return {
        "user": line,
        "text": out.text,
        "tokens": out.tokens,
        "finish_reason": out.reason,
        "tokens_per_second": talk.tokens_per_second,
        "position": talk.position,
    }


def _end_line(silent: bool) -> None:
    if not silent:
        print(flush=True)
