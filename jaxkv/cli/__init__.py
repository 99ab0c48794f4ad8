"""The command line: `jaxkv COMMAND ...`, one file a command.

Exit codes: 0; 2 for errors that the user can correct, with one line on standard error; 130 after
Ctrl-C, with the results so far; 141 where standard output was closed early, as for any unix tool;
1, with a traceback, for a bug in jaxkv.

This module does not import jax. It imports only the file of the command that runs, which imports
the rest when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from jaxkv import __version__
from jaxkv.cli.interrupts import INTERRUPTED, ignore_interrupts, leave, on_interrupt
from jaxkv.errors import UserError

COMMANDS = {
    "generate": "continue a prompt and print the text as it is generated",
    "chat": "talk with a model: one cache for the whole conversation",
    "perplexity": "how well a model predicts a text under a cache policy",
    "compare": "several policies on one text: a table and a picture of loss by position",
    "policies": "list the cache policies with their fields and memory, or describe one",
    "data": "tokenize texts into shards for pretrain",
    "pretrain": "train a model, with or without attention sinks",
    "serve": "serve a model to many clients concurrently",
}
CLOSED = 141
# Packages that a command may lack, by the extra that brings them.
EXTRAS = {
    "models": ("flax", "jax", "tokenizers"),
    "train": ("optax", "orbax", "orbax.checkpoint", "matplotlib", "safetensors"),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see {self.prog} --help")


def program() -> int:
    """The entry point of `jaxkv`; more Ctrl-C at the end do not change the exit code."""
    code = main()
    ignore_interrupts()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        _say("error", "standard output is closed; redirect it, for example to /dev/null")
        return 2
    try:
        with on_interrupt(leave), _warnings_as_lines():
            args = _parser(argv).parse_args(argv)
            code = args.run(args)
            sys.stdout.flush()
            return code
    except SystemExit as done:  # --help and --version
        return done.code or 0
    except UserError as error:
        _say("error", error)
        return 2
    except ModuleNotFoundError as error:
        extra = next((e for e, names in EXTRAS.items() if error.name in names), None)
        if extra is None:
            raise
        _say("error", f"this needs the package {error.name}; pip install 'jaxkv[{extra}]'")
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
    """The parser of all commands, with the flags of the chosen one only."""
    about = "Unbounded generation in constant memory, with Llama-family models on JAX."
    parser = Parser("jaxkv", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False
        )
        if name in argv[:1]:
            module = importlib.import_module(f"jaxkv.cli.{name}")
            module.add_flags(command)
            command.set_defaults(run=module.run)
    return parser


def _say(kind: str, message: object) -> None:
    # One write: threads of other libraries may write at the same time.
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
