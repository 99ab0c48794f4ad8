"""`jaxkv pretrain`: train a model, with or without attention sinks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", required=True,
        help="the recipe to start from: tiny, default, small or 160m (models/recipes.py)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings",
        help="one field of the recipe, may be repeated: sinks=none|zero|token|two_tokens|logit, "
        "steps, lr, ... (models/recipes.py lists them)",
    )  # fmt: skip
    parser.add_argument("--data", required=True, metavar="DIR", help="the output of `jaxkv data`")
    parser.add_argument(
        "--out", required=True, metavar="DIR",
        help="a folder for this run alone; the same command again resumes it",
    )  # fmt: skip
    parser.add_argument("--mesh", help="devices to split samples and weights over, as data=8")
    parser.add_argument(
        "--distributed", nargs="?", const="", metavar="HOST:PORT,PROCESSES,NUMBER",
        help="this is one process of several: the address of the first, their number, the index of "
        "this one (default: from the cluster's launcher)",
    )  # fmt: skip
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write OUT/tensorboard (tensorboardX)"
    )


def run(args: argparse.Namespace) -> int:
    with Progress("loading"):
        import jax

        if args.distributed is not None:
            _join(args.distributed)
        from jaxkv.models import data
        from jaxkv.models.pretrain import pretrain
        from jaxkv.models.recipes import read_recipe
        from jaxkv.state import sharding

        recipe = read_recipe(args.preset, args.settings)
        mesh = None if args.mesh is None else sharding.mesh_of(args.mesh)
        tokens = data.read(Path(args.data))

    def log(line: str) -> None:
        if jax.process_index() == 0:
            print(line, file=sys.stderr, flush=True)

    pressed: list[bool] = []

    def stop() -> None:
        pressed.append(True)
        # Not print: Ctrl-C may interrupt another print.
        os.write(2, b"\nstopping once this step is done and saved; Ctrl-C again exits at once\n")

    with on_interrupt(stop):
        model = pretrain(
            recipe, tokens, Path(args.out), mesh, log, lambda: bool(pressed), args.tensorboard
        )
    if model is None:
        return INTERRUPTED
    if jax.process_index() == 0:
        print(model)
    return 0


def _join(text: str) -> None:
    """Join the processes of a distributed run."""
    import jax

    address, *numbers = text.split(",")
    if text and (len(numbers) != 2 or not all(n.strip().isdecimal() for n in numbers)):
        raise UserError(
            f"--distributed is written HOST:PORT,PROCESSES,NUMBER, got {text!r}; try "
            "127.0.0.1:1234,2,0 in the first of two processes"
        )
    try:
        jax.distributed.initialize(address or None, *map(int, numbers))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of this run did not find each other: {str(error).splitlines()[0]}; "
            "start all of them, with one address and indices from 0 on"
        ) from None
