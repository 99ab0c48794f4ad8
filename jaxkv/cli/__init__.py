"""The command line: `jaxkv COMMAND ...`, one file per command.

Exit codes: 0; 2 for errors that the user can correct, with one line on standard error; 130 after
Ctrl-C, with the results so far; 141 if standard output was closed early, as for any unix tool; 143
after SIGTERM, as the first process of a container (elsewhere the signal itself); 70 from `jaxkv
serve`, if its engine failed; 1, with a traceback, for a bug in jaxkv.

This module does not import jax, so that `--help` is fast. It imports only the module of the given
command, whose `run` imports jax.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import IO

from jaxkv import __version__
from jaxkv.cli.interrupts import (
    INTERRUPTED,
    ignore_interrupts,
    leave,
    on_interrupt,
    terminable,
)
from jaxkv.errors import UserError, nearest

COMMANDS = {
    "generate": "continue a prompt and print the text as it is generated",
    "chat": "chat with a model: one cache for the whole conversation",
    "perplexity": "compute the perplexity of a text under a cache policy",
    "compare": "compare cache policies on one text: a table and a plot of loss by position",
    "advise": "measure cache policies at equal budgets on your own text, and say which to take",
    "calibrate": "measure how much of a KV budget each KV head of a model needs",
    "sinks": "measure how many attention sinks a model needs",
    "view": "write a web page that shows what is cached and where attention goes",
    "policies": "list the cache policies, describe one, or show the caches of a model's layers",
    "models": "list the model families that jaxkv runs",
    "data": "tokenize texts into shards for `jaxkv pretrain`",
    "pretrain": "train a model, with or without attention sinks",
    "serve": "start an HTTP server with OpenAI's API",
}
CLOSED = 141
# Optional packages, by the extra that installs them.
EXTRAS = {
    "models": ("flax", "jax", "tokenizers", "matplotlib"),
    "train": ("optax", "orbax", "orbax.checkpoint", "safetensors", "pyarrow"),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
}


def _is_flag(word: str) -> bool:
    return word.startswith("-")


def _flags_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The words before --, and of each the part before =: a flag, or a value."""
    return ((word, word.partition("=")[0]) for word in takewhile("--".__ne__, words))


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> None:
        if message.endswith("expected one argument"):
            message += "; give one, or write --flag=-1 if it begins with -"
        raise UserError(f"{message}; see {self.prog} --help")

    def print_help(self, file: IO[str] | None = None) -> None:
        (file or sys.stdout).write(self.format_help())  # argparse would ignore a full disk

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        # The words after a command are those of its own parser.
        has_commands = self._subparsers is not None
        first = [*takewhile(_is_flag, words)] if has_commands else words
        self.check_flags(first)
        parsed, unknown = super().parse_known_args(words, namespace)
        self._check_duplicates(first, parsed)
        return parsed, unknown

    def check_flags(self, words: Sequence[str]) -> None:
        """Raise UserError for the first unknown flag, with the nearest that exists.

        argparse would first miss what a mistyped flag was to give, such as --text.
        """
        known_flags = list(self._option_string_actions)
        for word, flag in _flags_in(words):
            if re.fullmatch(r"--?[a-zA-Z][\w-]*", flag) and flag not in known_flags:
                near = nearest(flag.lstrip("-"), [known.lstrip("-") for known in known_flags])
                meant = f"; did you mean --{near}?" if near else ""
                self.error(f"unrecognized arguments: {word}{meant}")

    def _check_duplicates(self, words: Sequence[str], parsed: argparse.Namespace) -> None:
        """Raise UserError where argparse would drop values.

        Those are a flag of several values that is given twice, --policy given twice, and a value
        twice among those of a flag. Of other flags the last value counts, so that the words of a
        script can be overridden.
        """
        counts = Counter(flag for _, flag in _flags_in(words))
        for action in self._actions:
            repeated = [flag for flag in action.option_strings if counts[flag] > 1]
            takes_many = action.nargs in ("+", "*")
            collects = isinstance(action, argparse._AppendAction)
            if repeated and not collects and (takes_many or action.dest == "policy"):
                remedy = ", or give all values after one" if takes_many else ""
                self.error(f"{repeated[0]} is given twice; remove the duplicate{remedy}")
            values = getattr(parsed, action.dest, None)
            if action.option_strings and isinstance(values, list):
                for value, count in Counter(values).items():
                    if count > 1:
                        flag = action.option_strings[-1]
                        self.error(f"{flag} has the value {value} twice; remove the duplicate")


def program() -> int:
    """The entry point of `jaxkv`. A further signal at the end does not change the exit code."""
    code = main()
    ignore_interrupts()
    compilation = sys.modules.get("jaxkv.models.loading.compilation")
    if code == INTERRUPTED and compilation is not None and compilation.is_compiling():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Python would wait for the programs that other threads compile
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        _say("error", "standard output is closed; redirect it, for example to /dev/null")
        return 2
    try:
        with terminable(), on_interrupt(leave), _warnings_as_lines():
            try:
                args = _parser(argv).parse_args(argv)
            except SystemExit as done:  # --help and --version
                code = done.code or 0
            else:
                code = args.run(args)
            sys.stdout.flush()
            return code
    except UserError as error:
        _say("error", error)
        return 2
    except ModuleNotFoundError as error:
        extra = next((e for e, names in EXTRAS.items() if error.name in names), None)
        if extra is None:
            raise
        _say("error", f"the package {error.name} is missing; pip install 'jaxkv[{extra}]'")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        _drop_stdout()
        _say("error", f"standard output cannot be written: {error.strerror}; write elsewhere")
        return 2


def _parser(argv: Sequence[str]) -> Parser:
    """The parser of all commands, of which only the given one has its flags."""
    about = "Bounded KV caches for Llama-family models on JAX: generation in constant memory."
    parser = Parser("jaxkv", description=about, allow_abbrev=False)
    parser.add_argument("-V", "--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
        near = nearest(argv[0], COMMANDS)
        meant = f"did you mean {near}? " if near else ""
        parser.error(f"unknown command {argv[0]!r}; {meant}there are {', '.join(COMMANDS)}")
    for name, summary in COMMANDS.items():
        about = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=about, allow_abbrev=False)
        if name in argv[:1]:
            module = importlib.import_module(f"jaxkv.cli.{name}")
            module.add_flags(command)
            command.set_defaults(run=module.run)
    return parser


def _say(kind: str, message: object) -> None:
    # One write, because threads of other libraries may write at the same time.
    sys.stderr.write(f"jaxkv: {kind}: {' '.join(str(message).splitlines())}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print each warning of the library once, in one line without its source location."""
    printed = set()

    def show(message: Warning, *_: object) -> None:
        if str(message) not in printed:
            printed.add(str(message))
            _say("warning", message)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def _drop_stdout() -> None:
    """Redirect closed standard output, so that its buffer cannot fail when Python exits."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
