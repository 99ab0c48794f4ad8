"""The Pallas kernels on an accelerator, against XLA: milliseconds, ratios, and equal signs.

Sign walks: those of a prompt of 32,768 tokens with 8 KV heads, against a scan. Sampled attention:
2 % of the keys of each of 32 query heads, against dense attention and against gathered blocks. Both
sides of a ratio alternate in one process. The record is named after the platform.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxkv.errors import UserError
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar
from jaxkv.evals.lib.verdict import Statement, above, below
from jaxkv.pallas_kernels.sampled_attention import bench as attention
from jaxkv.pallas_kernels.sampled_attention.shapes import LENGTHS
from jaxkv.pallas_kernels.sign_walk import bench as walks

WALK_FASTER, ATTENTION_FASTER = 10, 2  # bars on an NVIDIA GPU, the second at the longest cache
DTYPES = "float32", "bfloat16"


def measure(run: Run) -> dict[str, Any]:
    """Both kernels."""
    quick = run.options.quick
    if jax.default_backend() == "cpu" and not quick:
        raise UserError("kernels run on a GPU or TPU, got a CPU; --quick tries the program")
    return time_kernels(2 if quick else run.options.rounds, quick)


def time_kernels(rounds: int, quick: bool = False) -> dict[str, Any]:
    """Rows of both kernels, and the bars where there is a kernel."""
    bars, signs, attended = [], {}, {}
    for title, row in walks.measure(rounds, 16 if quick else None):
        signs[title] = spreads(row)
        print(f"sign walk, {title}: {signs[title]}", flush=True)
        if "kernel" in row:
            name, faster = f"sign walk, {title}", spread(row["times faster"])
            # Kernels may round products differently.
            bars += [
                bar(f"{name}: share of signs that differ", row["other signs"], "<=", 1e-3),
                bar(f"{name}: times faster than the scan", faster, ">=", WALK_FASTER),
            ]
    for dtype in DTYPES:
        for slots in LENGTHS[:1] if quick else LENGTHS:
            title = f"{dtype}, {slots} slots"
            rows = attention.time_attention(attention.shape_of(slots, dtype), rounds)
            attended[title] = {name: spreads(row) for name, row in rows.items()}
            print(f"sampled attention, {title}: {attended[title]}", flush=True)
            kernel = next((name for name in rows if name.startswith("pallas")), None)
            if kernel and slots == LENGTHS[-1]:
                faster = spread(rows[kernel]["times dense"])
                name = f"sampled attention, {title}: times faster than dense"
                bars.append(bar(name, faster, ">=", ATTENTION_FASTER))
    return {"sign_walk": signs, "sampled_attention": attended, "bars": bars}


def spreads(row: dict[str, Any]) -> dict[str, Any]:
    """Lists of measurements by their median and range, single numbers as they are."""
    return {name: spread(v) if isinstance(v, list) else v for name, v in row.items()}


STATEMENTS = (
    Statement("ACCELERATOR.md", "On a GPU it misses its target of ten times the speed of a scan",
              "kernels_gpu", [below("sign_walk/{case}/times faster", WALK_FASTER, sure=False)]),
    Statement("ACCELERATOR.md", "at 262,144 tokens it is over twice as fast as dense attention in "
              "float32, its target, and a little less in bfloat16", "kernels_gpu",
              [compare(f"sampled_attention/{dtype}, 262144 slots/pallas_gpu/times dense",
                       ATTENTION_FASTER, sure=False)
               for dtype, compare in zip(DTYPES, (above, below), strict=True)]),
)  # fmt: skip


MEASURE = Measure(
    lambda _: f"kernels_{jax.default_backend()}", measure,
    [flag("--rounds", 20, "of each measurement", minimum=1)],
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
