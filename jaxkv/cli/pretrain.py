"""`jaxkv pretrain`: train a model, with or without attention sinks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.cli import flags
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxkv.models.training.continued import BaseModel
    from jaxkv.models.training.data import Tokens
    from jaxkv.models.training.recipes import Recipe


class _Settings(argparse.Action):
    """Collects FIELD=VALUE. The last value of a field counts, as of a flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        option_string: str | None = None,
    ) -> None:
        field = value.partition("=")[0]
        earlier = getattr(namespace, self.dest)
        of_other_fields = [x for x in earlier if x.partition("=")[0] != field]
        setattr(namespace, self.dest, [*of_other_fields, value])


STARTS = (
    ("preset", str, None, None, "recipe: tiny, default, small, 160m, or backcopy for the data of "
     "models/training/letters.py (models/training/recipes.py describes all)"),
    ("from", str, None, "MODEL", "continue the training of a model: a folder, Hub id, GGUF file or "
     "smollm2-135m", {"dest": "base"}),
)  # fmt: skip
FLAGS = (
    ("train", str, None, "PART", "the weights that --from updates: all, attention or sinks "
     "(default all); others are frozen"),
    ("set", str, [], "FIELD=VALUE", "change a field of the recipe, such as steps, lr or "
     "sink_variant=none|zero|token|two_tokens|logit; may be repeated "
     "(models/training/recipes.py lists all)",
     {"action": _Settings, "dest": "settings"}),
    ("data", str, None, "DIR", "output folder of `jaxkv data`", {"required": True}),
    ("out", str, None, "DIR", "folder of this run, created if absent; the same command resumes the "
     "run", {"required": True}),
    ("mesh", str, None, None, "device mesh: data=8 shards samples and weights over 8 devices"),
    ("distributed", str, None, "HOST:PORT,PROCESSES,NUMBER", "join a run of several processes: "
     "address of the first process, number of processes, index of this one (default: from the "
     "cluster's launcher)", {"nargs": "?", "const": ""}),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add(parser.add_mutually_exclusive_group(required=True), *STARTS)
    flags.add(parser, *FLAGS)
    flags.add_switches(
        parser,
        plan="compile a step, print its memory on one device, and exit; nothing is allocated",
        tensorboard="also write TensorBoard logs to OUT/tensorboard (needs tensorboardX)",
    )


def run(args: argparse.Namespace) -> int:
    for setting in args.settings:
        if setting.startswith("train="):
            raise UserError(f"train has a flag of its own, got --set {setting}; give --train PART")
    with Progress("loading"):
        import jax

        if args.distributed is not None:
            _join(args.distributed)
        flags.check_device()
        from jaxkv.models.training import data
        from jaxkv.models.training.continued import open_base
        from jaxkv.models.training.pretrain import pretrain
        from jaxkv.models.training.recipes import read_recipe, recipe_from
        from jaxkv.state import sharding

        settings = args.settings + ([f"train={args.train}"] if args.train is not None else [])
        base = None if args.base is None else open_base(args.base)
        if base is None:
            recipe = read_recipe(args.preset, settings)
        else:
            recipe = recipe_from(base.config, settings)
        mesh = None if args.mesh is None else sharding.mesh_of(args.mesh)
        tokens = data.read(Path(args.data))

    if args.plan:
        return _show_plan(recipe, tokens, mesh, base)

    def log(line: str) -> None:
        if jax.process_index() == 0:
            print(line, file=sys.stderr, flush=True)

    pressed: list[bool] = []

    def stop() -> None:
        pressed.append(True)
        # os.write, because Ctrl-C may interrupt a print.
        os.write(2, b"\nstopping after this step, which is saved; Ctrl-C again exits at once\n")

    with on_interrupt(stop):
        model = pretrain(
            recipe, tokens, Path(args.out), mesh, log, lambda: bool(pressed), args.tensorboard, base
        )
    if model is None:
        return INTERRUPTED
    if jax.process_index() == 0:
        print(model)
    return 0


def _show_plan(recipe: Recipe, tokens: Tokens, mesh: Mesh | None, base: BaseModel | None) -> int:
    """Print the memory of a step."""
    from jaxkv.models.training.pretrain import setting_of
    from jaxkv.models.training.training import plan_memory
    from jaxkv.state.memory import show

    setting = (setting_of if base is None else base.setting)(recipe, tokens, mesh)
    with Progress("compiling"):
        sizes = plan_memory(setting)
    print(", ".join(f"{name} {show(size)}" for name, size in sizes._asdict().items()))
    return 0


def _join(text: str) -> None:
    """Join the processes of a distributed run."""
    import jax

    address, *numbers = text.split(",")
    if text and (len(numbers) != 2 or not all(n.strip().isdecimal() for n in numbers)):
        raise UserError(
            f"--distributed must be HOST:PORT,PROCESSES,NUMBER, got {text!r}; try "
            "127.0.0.1:1234,2,0 in the first of two processes"
        )
    try:
        jax.distributed.initialize(address or None, *map(int, numbers))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of this run did not connect: {str(error).splitlines()[0]}; "
            "start all of them, with the same address and indices from 0"
        ) from None
