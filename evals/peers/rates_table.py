"""The tables of the record of llama.cpp, for docs/results and for the end of a run."""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib.claim import ranged, table_head
from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.state.memory import show

RECORD = "llama_cpp"
NONE = "–"  # not measured in this case


def table() -> str:
    """The tables of the record; says so where there is none yet."""
    if not (RESULTS / f"{RECORD}.json").exists():
        return "Not recorded yet.\n"
    return of(read(RECORD, RESULTS)["results"])


def of(results: dict[str, Any]) -> str:
    """The setting, the rates of all cases, and jaxkv's over llama.cpp's."""
    peer, bandwidth = results["llama_cpp"], results["bandwidth"]["median"] / 1e9
    setting = (
        f"llama-cpp-python {peer['llama_cpp_python']} (ggml {peer['ggml']}), {results['threads']} "
        f"threads each, {results['prompt']:,} tokens before decoding of {results['new']:,}, "
        f"{results['rounds']} rounds, memory bandwidth {bandwidth:.1f} GB/s:\n"
    )
    below = "Tokens per second of jaxkv over those of llama.cpp:\n"
    return "\n".join([setting, rates(results), below, over(results)])


def rates(results: dict[str, Any]) -> str:
    """One row per case: tokens a second, and what decoding reads."""
    cases = results["cases"]
    titles = list(next(iter(cases.values()))["tokens_per_second"])
    heads = ["case", *titles, "bytes of weights", "GB/s", "of the bandwidth", "memory"]
    lines = table_head(*heads)
    for name, case in cases.items():
        found = [ranged(case["tokens_per_second"][title], "median", ",.0f") for title in titles]
        gigabytes = {at: value / 1e9 for at, value in case["bytes_per_second"].items()}
        cells = [name, *found, show(case["weight_bytes"]), ranged(gigabytes, "median", ".1f"),
                 f"{case['share_of_bandwidth']['median']:.0%}",
                 show(case["memory"]["resident"])]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def over(results: dict[str, Any]) -> str:
    """One row per measurement and case of jaxkv, one column per case of the peer."""
    by_title = results["ratio"]
    others = list(
        dict.fromkeys(
            other for cases in by_title.values() for found in cases.values() for other in found
        )
    )
    lines = table_head("measurement", "case", *others)
    for title, cases in by_title.items():
        for name, found in cases.items():
            ratios = [
                ranged(found[other], "median", ".2f") if other in found else NONE
                for other in others
            ]
            lines.append(f"| {' | '.join([title, name, *ratios])} |")
    return "\n".join(lines) + "\n"
