"""The commands of `jaxkv chat`: lines that begin with a slash.

What they say goes to standard error. A wrong command prints one line, and the chat goes on.
"""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING

from jaxkv.cli.progress import Progress, say
from jaxkv.errors import UserError

if TYPE_CHECKING:
    from jaxkv.models import Conversation, Llm, Sampling

EXIT = "/exit"


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
    """Run one command; an error of the user prints one line."""
    name, rest = (*line.split(None, 1), "")[:2]
    try:
        if name == EXIT:
            raise UserError(f"{EXIT} takes nothing after it, got {rest!r}; write {EXIT}")
        if name not in COMMANDS:
            commands = [*COMMANDS, EXIT]
            near = difflib.get_close_matches(name.lower(), commands, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"unknown command {name!r}; {meant}/help lists the commands")
        argument, _, act = COMMANDS[name]
        rest = rest.strip()
        if rest and not argument:
            raise UserError(f"{name} takes nothing after it, got {rest!r}; write {name}")
        if not rest and argument and not argument.startswith("["):
            raise UserError(f"{name} needs {argument}; write {name} {argument}")
        say(act(chat, rest))
    except UserError as error:
        say(f"error: {error}")


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
