"""Names or starts the first run for an accelerator that has no record."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import jax

from jaxkv.errors import UserError
from jaxkv.evals.lib.record import RESULTS, make_parser, run_command


class DeviceRun(NamedTuple):
    """A module, and the record that it writes."""

    record: str
    module: str


RUNS = (  # sink_tables, the arms of the 160M preset, has its record
    DeviceRun("device_flash", "device.flash"),
    DeviceRun("device_rates", "device.rates"),
)


def next_run(records: Path = RESULTS) -> DeviceRun | None:
    """The first run without a record."""
    return next((run for run in RUNS if not (records / f"{run.record}.json").exists()), None)


def main() -> None:
    parser = make_parser("jaxkv.evals.device", __doc__)
    parser.add_argument("--run", action="store_true", help="start the run")
    starts, run = parser.parse_args().run, next_run()
    if run is None:
        print("every run has a record")
        return
    module = f"jaxkv.evals.{run.module}"
    if not starts:
        print(f"python -m {module}")
        return
    if jax.default_backend() == "cpu":
        raise UserError(
            f"runs are for a GPU or a TPU, got a CPU; python -m {module} --quick tries it"
        )
    print(f"{module} on {jax.devices()[0].device_kind}", flush=True)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_command(main)
