"""Runs an experiment that its module describes as data: flags, model, texts and record.

An experiment's module lists these as `MEASURE` and ends with `run(MEASURE)`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxkv.errors import UserError
from jaxkv.evals.lib.record import Record, make_parser, run_command

if TYPE_CHECKING:
    from jaxkv.models.loading.llm import Llm

SMOLLM2, DEFAULT = "smollm2-135m", ""  # models; the second is that of the package


class Flag(NamedTuple):
    """A flag of an experiment, as `argparse` takes it."""

    name: str
    settings: dict[str, Any]


class Run(NamedTuple):
    """What an experiment gets. llm: None where it loads no model."""

    options: argparse.Namespace
    llm: Llm
    record: Record


class Measure(NamedTuple):
    """What an experiment runs.

    record: the name of its record, or a function that tells it from the options; --name replaces
    it. measure: returns the results. model: the default of --model; None loads no model. texts: the
    fewest files of --texts; 0 takes none. data: files that the record names, by the options.
    """

    record: str | Callable[[argparse.Namespace], str]
    measure: Callable[[Run], dict[str, Any]]
    flags: Sequence[Flag] = ()
    model: str | None = None
    texts: int = 0
    data: Callable[[argparse.Namespace], Iterable[Path]] = lambda _: ()


def flag(
    name: str, default: Any = None, about: str = "", minimum: float | None = None, **settings: Any
) -> Flag:
    """A flag whose type is that of its default.

    default: False for a switch, a tuple for several values. minimum: of a number. settings: others
    of `add_argument`; `type` where the default does not tell it.
    """
    if default is False:
        return Flag(name, {"action": "store_true", "help": about})
    several = isinstance(default, tuple)
    example = next(iter(default), "") if several else default
    kind = settings.pop("type", str if example is None else type(example))
    if minimum is not None:
        kind = partial(number, kind, minimum)
    if several:
        settings = {"nargs": "+"} | settings
    return Flag(name, {"type": kind, "default": default, "help": about} | settings)


def number(kind: type, minimum: float, word: str) -> float:
    """The number that a word stands for.

    Raises ArgumentTypeError where it is below the minimum or not a number.
    """
    try:
        value = kind(word)
    except ValueError:
        value = float("nan")
    if not value >= minimum:
        problem = f"must be at least {minimum:g}, got {word}; use {minimum:g} or more"
        raise argparse.ArgumentTypeError(problem)
    return value


def run(measure: Measure, words: Sequence[str] | None = None) -> None:
    """Run an experiment and write its record.

    words: of the command line; None takes those of the process. An error that the user can correct
    is one line, with exit code 2.
    """
    run_command(partial(_run, measure, words))


def _run(measure: Measure, words: Sequence[str] | None) -> None:
    from jaxkv import models

    options = parser_of(measure).parse_args(words)
    texts = options.texts if measure.texts else []
    names = [path.stem for path in texts]
    if len(names) < measure.texts or len(set(names)) < len(names):
        raise UserError(
            f"--texts must name at least {measure.texts} files with names of their own, got "
            f"{', '.join(names)}; intervals are over texts"
        )
    if options.name == "":
        raise UserError("--name must name a record, got ''; give a name, or leave --name out")
    llm = None
    if measure.model is not None:  # in float32: on a GPU the default is bfloat16
        llm = models.load(*([options.model] if options.model else []), dtype="float32")
    name = measure.record if isinstance(measure.record, str) else measure.record(options)
    files = [*(llm.files if llm else ()), *texts, *measure.data(options)]
    record = Record(options.name or name, files, seeds_of(options), options.quick)
    record.finish(measure.measure(Run(options, llm, record)))


def parser_of(measure: Measure) -> argparse.ArgumentParser:
    """The parser of an experiment's command line; its help is the docstring of the module."""
    module = sys.modules[measure.measure.__module__]
    parser = make_parser(module.__spec__.name.removesuffix(".__main__"), module.__doc__)
    if measure.model is not None:
        default = "" if measure.model else " (default: the model of the package)"
        parser.add_argument("--model", default=measure.model,
                            help=f"a model folder, GGUF file or Hub id{default}")  # fmt: skip
    if measure.texts:
        parser.add_argument("--texts", required=True, type=Path, nargs="+", help="text files")
    for name, settings in measure.flags:
        parser.add_argument(name, **settings)
    parser.add_argument("--name", help="of the record (default: of what is measured)")
    parser.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    return parser


def seeds_of(options: argparse.Namespace) -> Sequence[int]:
    """The seeds of a run: --seeds, a number or a list of them, or --seed."""
    seeds = getattr(options, "seeds", None)
    if seeds is None:
        return [getattr(options, "seed", 0)]
    return range(seeds) if isinstance(seeds, int) else seeds
