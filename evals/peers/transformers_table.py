"""The tables of the record of transformers, for docs/results and for the end of a run."""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib.claim import ranged, table_head
from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.evals.peers import rates_table
from jaxkv.evals.peers.rates_table import NONE
from jaxkv.state.memory import show

RECORD = "transformers_rates"


def table() -> str:
    """The tables of the record; says so where there is none yet."""
    if not (RESULTS / f"{RECORD}.json").exists():
        return "Not recorded yet.\n"
    return of(read(RECORD, RESULTS)["results"])


def of(results: dict[str, Any]) -> str:
    """The setting, rates and memory of all cases, and jaxkv's rates over transformers'."""
    peer, sizes, compiled = results["peer"], results["sizes"], results["compile"]
    setting = (
        f"transformers {peer['transformers']} with {peer['attention']} attention on torch "
        f"{peer['torch']}, float32, {results['threads']} threads each, {sizes['prompt']:,} tokens "
        f"before decoding of {sizes['new']:,} and to the first token. "
    )
    rounds = {title: next(iter(next(iter(found.values())).values()))["n"]
              for title, found in results["ratio"].items()}  # fmt: skip
    setting += f"Rounds: {', '.join(f'{title} {n}' for title, n in rounds.items())}. "
    setting += (
        f"The compiled case is not measured: `{compiled['failed']}`\n"
        if "failed" in compiled
        else f"torch.compile took {compiled['seconds']:.0f} seconds.\n"
    )
    over = "Speed of jaxkv over that of transformers:\n"
    peak = "Peak resident memory of the process, by the end of each measurement:\n"
    tables = [rates(results), over, rates_table.over(results), peak, memory(results)]
    return "\n".join([setting, *tables])


def rates(results: dict[str, Any]) -> str:
    """One row per case: tokens a second, and seconds to the first token."""
    first = {name: case.get("first_token") for name, case in results["cases"].items()}
    rated = {name: case["tokens_per_second"] for name, case in results["cases"].items()}
    titles = [title for title in results["ratio"] if any(title in of for of in rated.values())]
    lines = table_head("case", *titles, "first token (s)")
    for name, of_case in rated.items():
        cells = [shown(of_case.get(title), ".1f") for title in titles]
        lines.append(f"| {' | '.join([name, *cells, shown(first[name], '.2f')])} |")
    return "\n".join(lines) + "\n"


def memory(results: dict[str, Any]) -> str:
    """One row per case: the peak after each measurement, in the order of the run."""
    titles = list(results["ratio"])
    lines = table_head("case", *titles)
    for name, case in results["cases"].items():
        found = [case["memory"].get(title) for title in titles]
        cells = [show(at["peak"]) if at else NONE for at in found]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n"


def shown(found: dict[str, float] | None, form: str) -> str:
    return ranged(found, "median", form) if found else NONE
