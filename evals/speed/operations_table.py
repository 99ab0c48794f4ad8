"""The tables of the record of operations, for docs/results and for the end of a run."""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib import record
from jaxkv.evals.lib.claim import ranged, table_head

NAME = "operations"
HEADS = ("operation", "times", "ms", "of the whole", "MB read", "GFLOP", "GB/s", "of the bandwidth",
         "GFLOP/s", "of the FLOP limit")  # fmt: skip


def table() -> str:
    """The tables of the record; says so where there is none yet."""
    if not (record.RESULTS / f"{NAME}.json").exists():
        return "Not recorded yet.\n"
    return of(record.read(NAME, record.RESULTS)["results"])


def of(results: dict[str, Any]) -> str:
    """The setting with the limits, and a table for each case."""
    limits = {name: one["median"] / 1e9 for name, one in results["limits"].items()}
    empty = results["milliseconds of an empty program"]["median"]
    parts = [
        f"`{results['policy']}`, {results['rounds']} rounds. Limits of the same rounds: "
        f"{limits['bandwidth']:.1f} GB/s and {limits['flops']:.0f} GFLOP/s. A call of an empty "
        f"program takes {empty:.2f} ms.\n"
    ]
    parts += (f"{case}:\n\n{of_case(found)}" for case, found in results["cases"].items())
    return "\n".join(parts)


def of_case(found: dict[str, Any]) -> str:
    """One line per row, then their sum, the whole program, and the rest."""
    lines = table_head(*HEADS)
    rows = found["rows"] | {f"**{name}**": found[name] for name in ("sum of the rows", "whole")}
    lines += (f"| {' | '.join(cells(name, row))} |" for name, row in rows.items())
    rest = [ranged(found["rest"]["milliseconds"], "median", ".2f"),
            share(found["rest"]["share_of_whole"])]  # fmt: skip
    lines.append(f"| {' | '.join(['rest', '', *rest, *[''] * (len(HEADS) - 4)])} |")
    return "\n".join(lines) + "\n"


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """The cells of a row; empty where an operation reads or computes nothing."""
    read, *read_rate = figures(
        (row["weight_bytes"] + row["cache_bytes"]) / 1e6,
        row["bytes_per_second"], row["share_of_bandwidth"],
    )  # fmt: skip
    computed, *rate = figures(row["flops"] / 1e9, row["flops_per_second"], row["share_of_flops"])
    return [
        name, str(row["times"]), ranged(row["milliseconds"], "median", ".2f"),
        share(row["share_of_whole"]), read, computed, *read_rate, *rate,
    ]  # fmt: skip


def figures(count: float, rate: dict[str, float], of_limit: dict[str, float]) -> tuple[str, ...]:
    """A count, its rate in units of 1e9 per second, and the share of the limit."""
    if not count:
        return "", "", ""
    return f"{count:.3g}", f"{rate['median'] / 1e9:.3g}", share(of_limit)


def share(x: dict[str, float]) -> str:
    return f"{x['median']:.0%}"
