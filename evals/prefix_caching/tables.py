"""Claims, tables and statements of the records of prefix caching, for docs/results/prefix.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.verdict import Statement, above, below, claim, within
from jaxkv.state.memory import show

LINEAR = 0.99  # R² of a linear fit
REPORTED = 8.14  # percent of "What is your name?" that hit
STATES = (16, 32, 64)  # snapshots in memory; more than 64 save nothing more
LOADS = ("sessions", "mooncake", "azure")


def linear_fit(results: dict[str, Any]) -> dict[str, float]:
    """R² of a linear fit of the hit rate over the share of frequent prompts, by setting."""
    fits = {}
    for setting, curve in results["report"]["curves"].items():
        shares, rates = np.array([(float(p), point["mean"]) for p, point in curve.items()]).T
        fits[setting] = float(np.corrcoef(shares, rates)[0, 1] ** 2)
    return fits


def bytes_over_full(results: dict[str, Any]) -> dict[str, float]:
    """Bytes of the snapshots over those of all pages of a full cache, by policy."""
    return {
        policy: data["entries"][str(STATES[-1])]["bytes"] / results["full"]["bytes"]
        for policy, data in results["policies"].items()
    }


CLAIMS = (
    claim("Figure 1, no values", "The hit rate grows almost linearly with the share of frequent "
          "prompts: R² of a linear fit over 0.99", "prefix_replay", above(linear_fit, LINEAR),
          unit="error"),
    claim("section 3.2", f'Equal prompts ("What is your name?") hit in {REPORTED} %, within one '
          "point", "prefix_replay",
          within("report/what_is_your_name/rekey, block 16", REPORTED, by=1, sure=False),
          unit="percent"),
    claim("section 3.2", "They hit so seldom because their answers differ: equal answers raise the "
          "hit rate", "prefix_replay",
          above("report/greedy", "report/identical/rekey, block 16/16"), unit="percent"),
    claim("Figure 2: 459.22 against 416.92 answers per second of equal prompts",
          "Prefix caching raises answers per second by over 5 % at every share of frequent prompts",
          "prefix_engine", above("report/shares/{p}/times_faster", 1, by=0.05), unit="times"),
    claim("section 4, no figure", "Chained block hashes take less time than hashes of all tokens "
          "before (microseconds for 4,096 tokens)", "prefix_replay",
          below("speed/microseconds_of_4096_tokens/chained",
                "speed/microseconds_of_4096_tokens/direct"), unit="count"),
    claim("not claimed", f"{STATES[-1]} snapshots of an evicting cache save over 90 % of the "
          "prefill that all pages of a full cache save", "agents",
          above(f"policies/{{policy}}/entries/{STATES[-1]}/of_full", 0.9), unit="share"),
    claim("not claimed", f"{STATES[-1]} snapshots of an evicting cache take under a tenth of the "
          "bytes of these pages", "agents", below(bytes_over_full, 0.1), unit="share"),
    claim("not claimed", "Recorded requests are served faster with prefix caching", "prefix_engine",
          *(above(f"{load}/{{policy}}/times_faster", 1) for load in LOADS), unit="times"),
)  # fmt: skip


def hit_rates() -> str:
    """Hit rates of the report's experiment, by setting."""
    results = read("prefix_replay")["results"]
    curves, fits = results["report"]["curves"], linear_fit(results)
    shares = ("0.5", "1.0")
    lines = table_head("index", *(f"hits at p = {p} (%)" for p in shares), "R² over p")
    for setting, curve in curves.items():
        rates = (ranged(curve[p], "mean", ".1f") for p in shares)
        lines.append(table_row(setting, *rates, f"{fits[setting]:.3f}"))
    return page_table(lines)


def equal_prompts() -> str:
    """Hit rates of one prompt for all requests, by the number of concurrent requests."""
    results = read("prefix_replay")["results"]["report"]["ten_seeds"]
    lines = table_head("concurrent requests", "hits (%)", "computed (%)")
    for concurrent, data in sorted(results.items(), key=lambda item: int(item[0])):
        computed = f"{data['closed_form']:.1f}"
        lines.append(table_row(concurrent, ranged(data, "mean", ".1f"), computed))
    return page_table(lines)


def mooncake() -> str:
    """Hits on Mooncake's trace by the number of blocks that fit."""
    results = read("prefix_replay")["results"]["mooncake"]
    lines = table_head("blocks that fit", "tokens that hit")
    for capacity, data in results.items():
        blocks = "all" if capacity == "inf" else f"{int(capacity):,}"
        lines.append(table_row(blocks, f"{data['hit_rate_tokens']:.1%}"))
    return page_table(lines)


def agents() -> str:
    """Prefill saved of recorded sessions by number of snapshots, and bytes, by policy."""
    results = read("agents")["results"]
    full, tokens = results["full"], results["tokens"]
    heads = (f"saved by {states} snapshots" for states in STATES)
    lines = table_head("policy", *heads, f"memory of {STATES[-1]}")
    for policy, data in results["policies"].items():
        points = [data["entries"][str(states)] for states in STATES]
        saved = (f"{point['saved'] / tokens:.1%}" for point in points)
        lines.append(table_row(short(policy), *saved, show(points[-1]["bytes"])))
    caption = (
        f"{results['turns']} requests of recorded agents, {tokens:,} tokens together, chunks of "
        f"{results['chunk']} tokens. All pages of `full` save {full['share']:.1%} in "
        f"{show(full['bytes'])}."
    )
    return page_table(lines, caption)


def short(policy: str) -> str:
    """The name of a policy without its fields."""
    return f"`{policy.partition(':')[0]}`"


def served() -> str:
    """Recorded requests with and without prefix caching, by load and policy."""
    results = read("prefix_engine")["results"]
    heads = ("requests", "policy", "tokens cached", "times the answers per second",
             "first token without (s)", "with (s)")  # fmt: skip
    lines = table_head(*heads)
    for load in LOADS:
        for policy, data in results[load].items():
            first = data["first_token_seconds"]
            lines.append(table_row(
                load, short(policy), f"{data['hit_rate_tokens']:.0%}",
                ranged(data["times_faster"], "median", ".2f"),
                *(f"{first[name]['median']:.3f}" for name in ("none", "cached")),
            ))  # fmt: skip
    return page_table(lines)


def first_token() -> str:
    """Seconds to the first token after a cached prompt and after a new one."""
    results = read("serving")["results"]["first"]
    lines = table_head("policy", "new prompt (s)", "cached prompt (s)", "share")
    for policy, data in results["policies"].items():
        times = (ranged(data["seconds"][name], "median", ".3f") for name in ("miss", "hit"))
        share = ranged(data["share"], "median", ".1%")
        lines.append(table_row(short(policy), *times, share))
    return page_table(lines, f"Prompts of {results['prompt_tokens']:,} tokens:")


TABLES: dict[str, Callable[[], str]] = {
    "prefix_hit_rates": hit_rates,
    "prefix_equal_prompts": equal_prompts,
    "prefix_mooncake": mooncake,
    "prefix_agents": agents,
    "prefix_served": served,
    "prefix_first_token": first_token,
}
PAGE, NEGATIVE = "docs/results/prefix.md", "evals/NEGATIVE.md"
STATEMENTS = (
    Statement(PAGE, "64 snapshots of an evicting cache save as much prefill as all pages of a full "
              "cache, to within 1 %", "agents",
              [above("policies/{policy}/entries/64/of_full", 0.99)]),
    Statement(PAGE, "in less than a tenth of the memory", "agents", [below(bytes_over_full, 0.1)]),
    Statement(PAGE, "Long shared prefixes raise the rate over three times", "prefix_engine",
              [above("sessions/{policy}/times_faster", 3)]),
    Statement(PAGE, "saves more than storing every boundary, unless memory is unlimited",
              "prefix_replay",
              [*(above(f"snapshots/last+branch/{n}/share", f"snapshots/every=1/{n}/share")
                 for n in (64, 256, 1024, 4096)),
               below("snapshots/last+branch/inf/share", "snapshots/every=1/inf/share")]),
    Statement(PAGE, "Equal answers do not raise the hit rate", "prefix_replay",
              [within("report/greedy", "report/identical/rekey, block 16/16", by=1)]),
    Statement("docs/serving.md", "comes in under a tenth of the time", "serving",
              [below("first/policies/{policy}/share", 0.1)]),
    Statement(NEGATIVE, "hardly changes the rate of prompts of fifteen tokens", "prefix_engine",
              [within("report/shares/{p}/times_faster", 1, by=0.1)]),
    Statement(NEGATIVE, "Requests without common prefixes are served at about the same rate",
              "prefix_engine", [within("azure/{policy}/times_faster", 1, by=0.05, sure=False)]),
)  # fmt: skip
