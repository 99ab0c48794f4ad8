"""The claims of the report on prefix caching, and measurements beyond it."""

from __future__ import annotations

from functools import partial

import numpy as np

from jaxkv.evals.lib.claim import (
    Claim,
    Finding,
    Results,
    adder,
    by_all,
    grade,
    joined,
    listed,
    pick,
    spread,
)

LINEAR = 0.99  # R^2 of a linear fit
REPORTED = 8.14  # hit rate of "What is your name?" in percent
FASTER = 1.05  # the smallest ratio of speeds that counts
PREFIXES: list[Claim] = []
claim = adder(PREFIXES)
of_seeds = partial(spread, digits=1, middle="mean")


@claim("prefix_replay", "The hit rate grows almost linearly with the share p of frequent prompts",
       "Figure 1, no values")  # fmt: skip
def linear(r: Results) -> Finding:
    """Figure 1; the report does not state its block size."""
    explained, shown = [], {}
    for name, curve in r["report"]["curves"].items():
        x, y = np.array([(float(p), point["mean"]) for p, point in curve.items()]).T
        explained.append(float(np.corrcoef(x, y)[0, 1] ** 2) if y.std() else 0.0)
        shown[name] = f"{y[-1]:.1f} % and {explained[-1]:.3f}"
    return (
        "hit rate if all prompts are frequent ones, and R^2 of a linear fit over p; "
        f"{joined(f'{name}: {x}' for name, x in shown.items())}"
    ), by_all([x >= LINEAR for x in explained])


@claim("prefix_replay", 'Equal prompts ("What is your name?") hit in 8.14 %, because their '
       "answers differ", "section 3.2")  # fmt: skip
def one_prompt(r: Results) -> Finding:
    """The rate of 8.14 %, and the report's reason: each answer differs."""
    found = r["report"]
    short, greedy = found["what_is_your_name"]["rekey, block 16"], found["greedy"]
    there = short["min"] <= REPORTED <= short["max"]
    whole = found["identical"]["alias, block 16"]["16"]["mean"]
    why = greedy["mean"] > max(found["identical"]["rekey, block 16"]["16"]["max"], 1) * 2
    return (
        "six tokens, 16 requests at a time, block hashes that change with generated tokens: "
        f"{of_seeds(short)} % (hit rates by concurrent requests, fifteen tokens: "
        f"{listed(found['ten_seeds'], of_seeds)}); equal answers do not help: {of_seeds(greedy)} "
        "%. A prompt shorter than a block loses its hash with the first generated token, so only "
        f"requests admitted in the same step hit; with a second, fixed hash {whole:.1f} % hit"
    ), grade(there and why, there)


@claim("prefix_engine", "Prefix caching raises the number of answers per second",
       "Figure 2: 459.22 against 416.92 of equal prompts")  # fmt: skip
def faster(r: Results) -> Finding:
    """Figure 2, with jaxkv's engine and default model; the report has values for p = 1 only."""
    shares = r["report"]["shares"]
    times = {f"p = {p}": one["times_faster"] for p, one in shares.items()}
    felt = [x["min"] > 1 and x["median"] >= FASTER for x in times.values()]
    last = shares[max(shares, key=float)]
    each = last["items_per_second"]
    return (
        f"jaxkv's engine, the default model, max_batch={last['max_batch']}, prompts of 15 tokens "
        f"in blocks of {last['chunk']}; answers per second at p = 1: "
        f"{spread(each['none'])} without and "
        f"{spread(each['cached'])} with prefix caching; ratio: {listed(times, spread)}"
    ), grade(all(felt), felt[max(range(len(felt)), key=lambda n: float(list(shares)[n]))])


@claim("prefix_replay", "Block hashes can be chained", "section 4, no figure")
def chained(r: Results) -> Finding:
    took = r["speed"]["microseconds_of_4096_tokens"]
    return (
        "equal hits (a test compares them); hashing 4,096 tokens in blocks of 16, microseconds: "
        f"{listed(took, spread)}"
    ), grade(took["chained"]["max"] < took["direct"]["min"])


@claim("agents", "Evicting caches can share prefixes too", "not claimed")
def evicting_caches(r: Results) -> Finding:
    """Agents that send the whole conversation with every turn."""
    shown, near, full = [], [], r["full"]
    for policy, found in r["policies"].items():
        most = max(pick(found, "entries/*/saved").values())
        entries = min(int(n) for n, x in found["entries"].items() if x["saved"] == most)
        point = found["entries"][str(entries)]
        near.append(point["of_full"] >= 0.9 and point["bytes"] < full["bytes"])
        shown.append(
            f"{policy.split(':')[0]} {point['of_full']:.1%} by {entries} states in "
            f"{point['bytes'] / 2**20:.0f} MiB, {point['distinct'] / 2**20:.0f} MiB with each "
            "shared page counted once"
        )
    return (
        f"{r['turns']} recorded turns of {r['tokens']:,} tokens, chunks of {r['chunk']}; full "
        f"saves {full['share']:.1%} of them in {full['bytes'] / 2**20:,.0f} MiB; of that: "
        f"{joined(shown)}"
    ), by_all(near)


@claim("prefix_engine", "Recorded requests are served faster", "not claimed")
def through_the_engine(r: Results) -> Finding:
    shown, quicker = [], []
    for name in ("sessions", "mooncake", "azure"):
        for policy, found in r[name].items():
            times, first = found["times_faster"], found["first_token_seconds"]
            quicker.append(times["min"] > 1)
            shown.append(
                f"{name}, {policy.split(':')[0]}: {found['hit_rate_tokens']:.0%} of the tokens "
                f"cached, {spread(times)} times the answers per second, median time to first token "
                f"{first['none']['median']:.3f} s without and "
                f"{first['cached']['median']:.3f} s with"
            )
    return (
        f"the default model, lengths divided by 8 except for sessions; {joined(shown)}"
    ), by_all(quicker)


@claim("soak", "When clients disconnect, nothing leaks and no answer changes", "not claimed")
def soaked(r: Results) -> Finding:
    shown = []
    for policy, batches in r["policies"].items():
        for batch, found in batches.items():
            lives = [[rest["resident"] for rest in life["rests"]] for life in found["lives"]]
            growth = max(sizes[-1] / sizes[min(2, len(sizes) - 1)] for sizes in lives)
            ratios = [ratio for life in found["lives"] for ratio in life["unfairness"]]
            shown.append(
                f"{policy.split(':')[0]}, {batch} batch: {found['requests']:,} requests of 4 API "
                f"keys, {found['left']:,} clients disconnected, one restart; {found['wrong']} "
                f"answers differ; resident memory at the end {growth:.3f} times that after 2,000 "
                f"requests; the keys, of which one has three times the clients of each other, get "
                f"answers within a factor of {max(ratios):.2f}"
            )
    return joined(shown), by_all([line["met"] for line in r["bars"]])
