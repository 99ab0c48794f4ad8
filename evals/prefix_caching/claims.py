"""The claims of the report on prefix caching, and what is ours: what the records say of each."""

from __future__ import annotations

import numpy as np

from jaxkv.evals.lib.claim import HOLDS, NOT, PART, Claim, Finding, Results, by_all
from jaxkv.evals.reservoir.claims import listed, of_spread

LINEAR = 0.99  # of the variance that a straight line explains
REPORTED = 8.14  # per cent of the blocks of "What is your name?"
FASTER = 1.05  # of two speeds: a difference that counts as one


def linear(r: Results) -> Finding:
    """Figure 1, for the report does not say how large its blocks were."""
    explained, last = {}, {}
    for name, curve in r["report"]["curves"].items():
        x, y = np.array([(float(p), point["mean"]) for p, point in curve.items()]).T
        explained[name] = float(np.corrcoef(x, y)[0, 1] ** 2) if y.std() else 0.0
        last[name] = y[-1]
    shown = [f"{name}: {last[name]:.1f} % and {explained[name]:.3f}" for name in explained]
    return (
        "hits where all prompts are frequent ones, and what of the variance over p a straight line "
        f"explains; {'; '.join(shown)}",
        by_all([x >= LINEAR for x in explained.values()]),
    )


def one_prompt(r: Results) -> Finding:
    """8.14 %, and why: the report says, because each answer differs."""
    found = r["report"]
    short, ten = found["what_is_your_name"]["rekey, block 16"], found["ten_seeds"]
    greedy, seeds = found["greedy"], listed(ten, of_seeds)
    there = short["min"] <= REPORTED <= short["max"]
    whole = found["identical"]["alias, block 16"]["16"]["mean"]
    why = greedy["mean"] > max(found["identical"]["rekey, block 16"]["16"]["max"], 1) * 2
    return (
        f"six tokens, 16 slots, keys that follow what a block holds by now: {of_seeds(short)} % "
        f"(slots to hits, fifteen tokens: {seeds}); equal answers do not help: "
        f"{of_seeds(greedy)} %. A prompt shorter than a block loses its key with the first token "
        "that is written, so only requests admitted in one step find it; with a key that stays "
        f"{whole:.1f} % are found",
        HOLDS if there and why else PART if there else NOT,
    )


def faster(r: Results) -> Finding:
    """Figure 2, by our engine and our default model; its one pair of values is that of p = 1."""
    shares = r["report"]["shares"]
    times = {f"p = {p}": one["times_faster"] for p, one in shares.items()}
    last = shares[max(shares, key=float)]
    each = last["items_per_second"]
    return (
        f"our engine, the default model, {last['slots']} slots, prompts of 15 tokens in blocks of "
        f"{last['chunk']}; answers a second at p = 1 {of_spread(each['none'])} without and "
        f"{of_spread(each['kept'])} with; with over without: {listed(times, of_spread)}",
        HOLDS
        if all(map(_is_faster, times.values()))
        else PART
        if _is_faster(last["times_faster"])
        else NOT,
    )


def _is_faster(times: dict[str, float]) -> bool:
    return times["min"] > 1 and times["median"] >= FASTER


def chained(r: Results) -> Finding:
    took = r["speed"]["microseconds_of_4096_tokens"]
    return (
        "the same hits (a test compares them); keys of 4,096 tokens in blocks of 16, microseconds: "
        f"{listed(took, of_spread)}",
        HOLDS if took["chained"]["max"] < took["direct"]["min"] else NOT,
    )


def forgets(r: Results) -> Finding:
    """Agents that send all that was said before with every turn."""
    shown, near = [], []
    for policy, found in r["policies"].items():
        most = max(point["saved"] for point in found["slots"].values())
        slots = min((int(n) for n, p in found["slots"].items() if p["saved"] == most))
        point = found["slots"][str(slots)]
        near.append(point["of_full"] >= 0.9 and point["bytes"] < r["full"]["bytes"])
        shown.append(
            f"{policy.split(':')[0]} {point['of_full']:.1%} by {slots} states in "
            f"{point['bytes'] / 2**20:.0f} MiB, {point['distinct'] / 2**20:.0f} of them unlike"
        )
    full = r["full"]
    return (
        f"{r['turns']} recorded turns of {r['tokens']:,} tokens, chunks of {r['chunk']}; full "
        f"saves {full['share']:.1%} of them in {full['bytes'] / 2**20:,.0f} MiB; of that: "
        f"{'; '.join(shown)}",
        by_all(near),
    )


def through_the_engine(r: Results) -> Finding:
    shown, quicker = [], []
    for name in ("sessions", "mooncake", "azure"):
        for policy, found in r[name].items():
            times, first = found["times_faster"], found["first_token_seconds"]
            quicker.append(times["min"] > 1)
            shown.append(
                f"{name}, {policy.split(':')[0]}: {found['hit_rate_tokens']:.0%} found, answers a "
                f"second {of_spread(times)} times, seconds to the first token (median) "
                f"{first['none']['median']:.3f} and {first['kept']['median']:.3f}"
            )
    return (
        f"the default model, lengths divided by 8 but those of sessions; {'; '.join(shown)}",
        by_all(quicker),
    )


def soaked(r: Results) -> Finding:
    shown = []
    for policy, found in r["policies"].items():
        sizes = [rest["resident"] for rest in found["rests"]]
        shown.append(
            f"{policy.split(':')[0]}: {found['requests']:,} requests, of which {found['left']:,} "
            f"clients left; {found['wrong']} answers differ; resident memory at the end "
            f"{sizes[-1] / sizes[min(2, len(sizes) - 1)]:.3f} times that after 2,000"
        )
    return "; ".join(shown), by_all([line["met"] for line in r["bars"]])


def of_seeds(x: dict[str, float]) -> str:
    return f"{x['mean']:.1f} ({x['min']:.1f} to {x['max']:.1f})"


PREFIXES = [
    Claim("The hit rate grows almost linearly with the share p of frequent prompts",
          "Figure 1, no values", "prefix_replay", linear),
    Claim("Equal prompts (\"What is your name?\") are found in 8.14 %, for their answers differ",
          "section 3.2", "prefix_replay", one_prompt),
    Claim("More answers a second than without", "Figure 2: 459.22 against 416.92 of equal prompts",
          "prefix_engine", faster),
    Claim("Keys may be chained", "section 4, no figure", "prefix_replay", chained),
    Claim("Caches that forget can share prefixes too", "not claimed", "agents", forgets),
    Claim("Recorded requests are answered sooner", "not claimed", "prefix_engine",
          through_the_engine),
    Claim("Whoever leaves, nothing leaks and no answer changes", "not claimed", "soak", soaked),
]  # fmt: skip
