"""`jaxkv chat`: chat with a model, with one cache for the whole conversation."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv import defaults
from jaxkv.cli import flags
from jaxkv.cli.files import check_file, print_json
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt, send_again, stop
from jaxkv.cli.progress import Progress, say
from jaxkv.errors import UserError, nearest
from jaxkv.files import decode

if TYPE_CHECKING:
    from jaxkv.models import Conversation, Llm, Sampling

EXIT = "/exit"


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
    elif path is not None:
        check_file(Path(path).expanduser(), "--session")
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
            is_command = begin.startswith("/") and begin != "//"
            try:
                if is_command:
                    with on_interrupt(stop):
                        obey(chat, line.strip())
                else:
                    turns.append(answer(chat, line.lstrip()[1:] if begin == "//" else line))
            except UserError as error:  # the chat goes on
                reset = "" if is_command else "; or begin an empty conversation with /reset"
                say(f"error: {error}{reset}")
                code = 0 if sys.stdin.isatty() else 2
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


class ChatState:
    """The chat in progress and its settings. policy, system: of the next fresh conversation."""

    def __init__(self, args: argparse.Namespace, llm: Llm, sampling: Sampling):
        self.args, self.llm, self.sampling = args, llm, sampling
        self.policy, self.system = args.policy, args.system
        self.talk = self.fresh(self.policy, self.system)

    def fresh(self, policy: str, system: str | None) -> Conversation:
        """An empty conversation."""
        from jaxkv.models import Conversation

        return Conversation(self.llm, policy, system, self.args.seed)

    def announce(self, talk: Conversation) -> None:
        """Say that a conversation compiles, unless this process has its programs already."""
        from jaxkv.policy_spec import format_policy

        talk.compile_ahead(self.sampling, self.args.ignore_eos)
        if count := talk.stream.ahead.count:
            policy = format_policy(talk.stream.policies)
            say(f"compiling {count} programs for {policy}: up to a minute; Ctrl-C stops it")

    def warm_up(self, talk: Conversation) -> None:
        """Compile all that turns of a conversation need, with progress."""
        with Progress("compiling", unit="programs", steady=False) as progress:
            talk.warm_up(self.sampling, self.args.ignore_eos, progress.at)

    @property
    def memory(self) -> str:
        """The memory of the cache and the length of the conversation."""
        from jaxkv.state.memory import show

        return f"cache {show(self.talk.stream.state_bytes)}, position {self.talk.position}"

    @property
    def status(self) -> str:
        """The speed of the last answer, and `memory`."""
        talk = self.talk
        cut = " (cut: --max-new-tokens)" if talk.output.reason == "length" else ""
        speed = f"{talk.output.count} tokens{cut}, {talk.tokens_per_second:.1f} tokens/s"
        return f"[{speed}, {self.memory}]"

    @property
    def written_policy(self) -> str:
        """The policy with all its fields."""
        from jaxkv.policy_spec import format_policy

        return format_policy(self.talk.stream.policies)


def obey(chat: ChatState, line: str) -> None:
    """Run one command, a line that begins with a slash; it prints to standard error.

    Raises UserError for an unknown command and for wrong arguments.
    """
    name, rest = (*line.split(None, 1), "")[:2]
    if name == EXIT:
        raise UserError(f"{EXIT} takes nothing after it, got {rest!r}; write {EXIT}")
    if name not in COMMANDS:
        near = nearest(name, [*COMMANDS, EXIT])
        meant = f"did you mean {near}? " if near else ""
        raise UserError(f"unknown command {name!r}; {meant}/help lists the commands")
    argument, _, act = COMMANDS[name]
    rest = rest.strip()
    if rest and not argument:
        raise UserError(f"{name} takes nothing after it, got {rest!r}; write {name}")
    if not rest and argument and not argument.startswith("["):
        raise UserError(f"{name} needs {argument}; write {name} {argument}")
    say(act(chat, rest))


def _help(chat: ChatState, _: str) -> str:
    usages = {
        f"{name} {argument}".strip(): about for name, (argument, about, _) in COMMANDS.items()
    }
    usages |= {EXIT: "exit", "//...": "send a message that begins with /"}
    width = max(map(len, usages))
    return "\n".join(f"{usage:{width}}  {about}" for usage, about in usages.items())


def _reset(chat: ChatState, _: str) -> str:
    chat.talk = chat.fresh(chat.policy, chat.system)
    return "the conversation is empty"


def _system(chat: ChatState, text: str) -> str:
    if not text:
        return f"system message: {chat.system or 'none'}"
    chat.talk = chat.fresh(chat.policy, text)
    chat.system = text
    return "a new conversation begins with this system message"


def _policy(chat: ChatState, text: str) -> str:
    if not text:
        return f"{chat.written_policy}; {chat.memory}"
    talk = chat.fresh(text, chat.system)  # raises for an unknown policy
    try:
        chat.announce(talk)
        chat.warm_up(talk)
    except KeyboardInterrupt:
        talk.stream.ahead.cancel()
        return f"stopped; the conversation goes on under {chat.written_policy}"
    chat.talk, chat.policy = talk, text
    return (
        f"{chat.written_policy}; the conversation is empty, because a cache cannot be converted "
        "to another policy"
    )


def save_session(chat: ChatState, path: str) -> str:
    from jaxkv.models.generation import session as files

    files.save(path, chat.talk)
    return f"saved {path}, position {chat.talk.position}"


def check_session(path: str, llm: Llm, policy: str | None = None) -> str:
    """The policy of a session; raises UserError where it, or `policy`, does not fit."""
    from jaxkv.models.generation import session as files

    return files.check(path, llm, policy)


def load_session(chat: ChatState, path: str) -> str:
    from jaxkv.models.generation import session as files

    policy, talk = check_session(path, chat.llm), chat.talk
    if policy != chat.written_policy:
        talk = chat.fresh(policy, None)
        chat.announce(talk)
    chat.talk, chat.policy = files.load(path, talk), policy
    first = chat.talk.messages[:1]
    chat.system = first[0]["content"] if first and first[0]["role"] == "system" else None
    count = len(chat.talk.messages)
    return (
        f"loaded {path}, {count} message{'s' * (count != 1)}, position {chat.talk.position}, "
        f"under {policy}"
    )


# Name -> what follows it, what it does, the function. In brackets: may be left out.
COMMANDS = {
    "/help": ("", "list the commands", _help),
    "/reset": ("", "begin an empty conversation", _reset),
    "/system": ("[TEXT]", "show the system message, or begin a conversation with another", _system),
    "/policy": ("[POLICY]", "show the policy, or begin a conversation under another", _policy),
    "/save": ("FILE", "save the conversation with its cache", save_session),
    "/load": ("FILE", "continue a saved conversation", load_session),
}
