"""Compression that is repeated in endless text, against a plain window of the same bytes.

Every cache reads the beginnings of the same novels. Its loss is compared token by token with that
of `streaming`. The cache of each policy is the largest that takes no more bytes. A query sees the
tokens that the last compression kept, and those after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxkv.errors import UserError
from jaxkv.evals.lib.paired_losses import (
    BIN,
    TOKENS,
    Case,
    compare,
    measure_cases,
    record_header,
    texts_of,
)
from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.state_sizes import sequence_bytes, streaming
from jaxkv.evals.lib.table import over_base, table
from jaxkv.evals.lib.verdict import Statement, above, below
from jaxkv.evals.tasks import model_rows
from jaxkv.evals.tasks.budgets import (
    CALIBRATED_HALF_WINDOW,
    HALF_WINDOW,
    MIN_CAPACITY,
    SINKS,
    WINDOW,
    repeated,
)
from jaxkv.models.loading.llm import Llm
from jaxkv.state.memory import show

BASE = "streaming"
IN_TEXT = ("rkv", "vase", "triattention")  # their published code counts positions in the text


def policies(budget: int, every: int, calibration: str | None) -> dict[str, str]:
    """The string of every policy, as in `repeated`, and of other forms of some."""
    by_name = repeated(budget, every, WINDOW, calibration)
    half_window = f"{by_name['triattention']},window={(budget - every) // 2}"
    absolute = {f"{name}-absolute": f"{by_name[name]},positions=absolute" for name in IN_TEXT}
    return by_name | absolute | {"triattention-half-window": half_window}


FLAGS = (
    TOKENS,
    flag("--budget", 256, "tokens that a query sees under streaming", minimum=64),
    flag("--every", 32, "tokens between two compressions", minimum=1),
    flag("--policies", (), f"besides {BASE} (default: all)", choices=[*policies(256, 32, "FILE")]),
)


def cases(llm: Llm, budget: int, every: int, names: Sequence[str] = ()) -> dict[str, Case]:
    """These caches, or all, within the bytes of streaming with this budget.

    Raises UserError where `every` tokens leave a policy too few bytes.
    """
    base = streaming(budget - SINKS)
    max_bytes, by_name = sequence_bytes(llm, base), {BASE: Case(base)}
    calibration = model_rows.calibration_of(llm)
    for name in names or policies(budget, every, calibration):
        sizes = range(budget, every + MIN_CAPACITY - 1, -1)
        strings = (policies(size, every, calibration)[name] for size in sizes)
        policy = next((x for x in strings if sequence_bytes(llm, x) <= max_bytes), None)
        if policy is None:
            raise UserError(
                f"{name} must fit the {max_bytes:,} bytes of {BASE} with --budget {budget}, which "
                f"--every {every} exceeds; give a smaller --every, or a larger --budget"
            )
        by_name[name] = Case(policy)
    return by_name


def measure(run: Run) -> dict[str, Any]:
    """All caches on all texts: losses beyond the size of the cache, and bytes."""
    llm, options = run.llm, run.options
    model_rows.check(llm, options.policies)
    caches = cases(llm, options.budget, options.every, options.policies)
    by_text = measure_cases(llm, texts_of(run), caches, BASE, run.record)
    skip = -(-2 * options.budget // BIN) * BIN  # every cache evicts
    compared = compare(by_text, list(caches), BASE, skip)
    for name, row in compared["rows"].items():
        row["state_bytes"] = sequence_bytes(llm, caches[name].policy)
    return record_header(llm, caches, by_text) | compared | {"budget": options.budget}


NAME, FORMS = "endless_losses", "endless_losses_forms"  # FORMS: other forms of some policies
MEASURE = Measure(NAME, measure, FLAGS, model=SMOLLM2, texts=1)


def losses_table() -> str:
    """A row per policy, the smallest loss first."""
    results, *later = (
        read(name)["results"] for name in (NAME, FORMS) if (RESULTS / f"{name}.json").exists()
    )
    for other in later:
        results["rows"] |= {k: row for k, row in other["rows"].items() if k != BASE}
        results["cases"] |= other["cases"]
    first, last = results["tokens"]
    caption = (
        f"Nats per token, tokens {first:,} to {last:,} of {len(results['by_text'])} novels under "
        "SmolLM2-135M; ± gives two standard errors over novels."
    )
    heads = ("policy", "loss minus streaming's", "state", "policy string")
    rows = sorted(results["rows"].items(), key=lambda row: row[1]["loss_over_base"])
    return table(heads, (
        (f"`{name}`", "0" if name == BASE else over_base(row),
         show(row["state_bytes"]), f"`{results['cases'][name]['policy']}`")
        for name, row in rows
    ), caption)  # fmt: skip


TABLES = {NAME: losses_table}
PAGE = "docs/results/policies.md"
LARGE = 0.1  # nats
STATEMENTS = (
    Statement(PAGE, "With calibrated budgets and half of its capacity as window, `retrieval` loses "
              "no more than `streaming`, within 0.02 nats", NAME,
              [below(f"rows/{CALIBRATED_HALF_WINDOW}", 0.02)]),
    Statement(PAGE, "`rkv`, `vase` and `snapkv` lose up to 0.04 nats more", NAME,
              [below(f"rows/{name}", 0.04) for name in ("rkv", "vase", "snapkv")]),
    Statement(PAGE, "`retrieval` with a window of 32 tokens, `triattention`, `keydiff` and "
              "`expected-attention` lose over 0.1 nats more", NAME,
              [above(f"rows/{name}", LARGE)
               for name in ("retrieval", "triattention", "keydiff", "expected-attention")]),
    Statement("docs/which_cache.md", "its loss is no higher than that of `streaming` with as many "
              "bytes, within 0.02 nats", NAME, [below(f"rows/{CALIBRATED_HALF_WINDOW}", 0.02)]),
    Statement("docs/which_cache.md", "With adaptive budgets and a window of 32 tokens it is over "
              "0.1 nats higher", NAME, [above("rows/retrieval", LARGE)]),
    Statement("evals/NEGATIVE.md", "its loss exceeds that of `streaming` by over 0.1 nats with a "
              "window of 32 tokens, and by over 0.02, the goal, with half of its capacity as the "
              "window", NAME,
              [above("rows/retrieval", LARGE),
               above(f"rows/{HALF_WINDOW}/loss_over_base", 0.02)]),
    Statement(PAGE, "half of the capacity as window is better than 32 tokens", NAME,
              [below(f"rows/{HALF_WINDOW}", "rows/retrieval")]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
