"""The claims of reservoir sampling.

Verdicts concern the paper's own variants. Stratified and weighted uniform sampling, added here, are
shown for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import mean

from jaxkv.evals.lib.claim import (
    UNSEEN,
    Claim,
    Finding,
    Results,
    adder,
    by_all,
    grade,
    joined,
    listed,
    over_base,
    pick,
    spread,
)
from jaxkv.evals.lib.paired_losses import compare
from jaxkv.evals.reservoir.stream_losses import SKIP

ACCEPTED = 119.9  # 99.99th percentile of chi-square with 63 degrees of freedom
SAMPLES = ("reservoir", "stratified", "balance-stream")
FELT = 0.05  # of all answers: the smallest difference that counts
OURS = "the default model"
RESERVOIR: list[Claim] = []
claim = adder(RESERVOIR)


@claim("known_answers", "Every token evicted from the window is equally likely to be in the sample",
       "equations 1 and 2, Figure 4")  # fmt: skip
def equally_likely(r: Results) -> Finding:
    """By the equations, and by the paper's listing, which draws again at every token."""
    (found,) = (x for x in r["reservoir"].values() if "geometric" in x)
    fair, listing = found["uniform"] < ACCEPTED, found["geometric"] < ACCEPTED
    return (
        f"samples of {found['sample']} of {found['tokens']} tokens, {found['seeds']:,} seeds, "
        "chi-square with "
        f"{found['tokens'] - 1} degrees of freedom: the equations (`scheme=uniform`) "
        f"{found['uniform']:.0f}, the pseudocode as printed (`scheme=geometric`) "
        f"{found['geometric']:,.0f}"
    ), grade(fair and listing, fair)


@claim("tasks", "A sample of the evicted tokens improves long-term memory",
       "sections 6 and 7, no figure")  # fmt: skip
def finds_needles(r: Results) -> Finding:
    """Right answers about needles that the window of streaming has evicted."""
    shown, better = [], []
    for task, by_length in r["tasks"].items():
        for length, found in by_length.items():
            for ratio, rows in found["ratios"].items():
                if not found["scored"] or not {"streaming", "reservoir"} <= set(rows):
                    continue
                caches = {n: rows[n] for n in ("streaming", *SAMPLES) if n in rows}
                evicted = int(len(found["full"]["by_depth"]) * (1 - float(ratio)))
                far = {n: mean(x["by_depth"][:evicted]) for n, x in caches.items()}
                better.append(far["reservoir"] > far["streaming"] + FELT)
                depths = {n: " ".join(f"{x:.0%}" for x in row["by_depth"])
                          for n, row in ({"full": found["full"]} | caches).items()}  # fmt: skip
                every = listed({n: x["score"] for n, x in caches.items()}, "{:.0%}".format)
                shown.append(
                    f"{task}, {int(length):,} tokens, caches of {100 * float(ratio):g}%, by part "
                    f"of the context, of which the first {evicted} are evicted: "
                    f"{listed(depths, str)}; all: {every}"
                )
    text = f"{r['samples']} samples, right answers; {joined(shown)}"
    return (text, by_all(better)) if better else (text, UNSEEN)


@claim("recall", "In small models, a sample of the evicted tokens improves long-term memory",
       "sections 6 and 7, no figure")  # fmt: skip
def remembers(r: Results) -> Finding:
    """Right answers about facts older than the window, compared with streaming."""
    names = (
        *("full", "streaming", "reservoir", "reservoir, geometric", "reservoir, weighted"),
        *("stratified", "balance-stream", "h2o"),
    )
    far = answers(r, names, beyond(r))
    near = answers(r, names[1:3], lambda distance: distance <= r["slots"])
    better = [min(far[name]) > max(far["streaming"]) + FELT for name in names[2:4]]
    return (
        f"{about(r)}: {listed(far, of_seeds)}; of nearer ones: {listed(near, of_seeds)}",
        by_all(better),
    )


@claim("recall", "A larger sample improves the answer", "section 6, no figure")
def larger_is_better(r: Results) -> Finding:
    shown, rises = [], {}
    for kind in ("reservoir", "stratified"):
        names = {16: f"{kind}, sample 16", 64: kind, 256: f"{kind}, sample 256"}
        right = answers(r, names.values(), beyond(r))
        shown += [f"{kind} {size}: {of_seeds(right[name])}" for size, name in names.items()]
        rises[kind] = [a + FELT < b for a, b in pairwise(map(mean, right.values()))]
    return f"{about(r)}; {', '.join(shown)}", by_all(rises["reservoir"])


@claim("stream_losses", "The loss of reservoir sampling is lower than that of StreamingLLM",
       "not claimed")  # fmt: skip
def loses_less(r: Results) -> Finding:
    row = r["rows"]["reservoir"]
    return (
        f"{r['model']}, {len(r['texts'])} novels, equal bytes; loss minus that of streaming, nats "
        "per token, ± two standard errors over novels, mean number of cached tokens per KV head, "
        f"tokens read per novel: {over_streaming(r, 'weighted', False)}"
    ), grade(max(row["loss_over_base_by_text"]) < 0, row["loss_over_base"] < 0)


@claim("stream_losses", "Weights that make a sample unbiased lower the loss", "not claimed")
def weights_help(r: Results) -> Finding:
    """For every sampled cache with cache-relative positions, on the tokens that both forms read."""
    pairs = [name.removesuffix(", weighted") for name in r["rows"] if name.endswith(", weighted")]
    gaps = {
        name: compare(r["by_text"], [name, f"{name}, weighted"], name, SKIP)["rows"][
            f"{name}, weighted"
        ]
        for name in pairs
    }
    helped = [row["loss_over_base"] < 0 for row in gaps.values()]
    shown = listed(gaps, lambda x: over_base(x)[1:-1])
    return (
        f"{r['model']}, {len(r['texts'])} novels; loss with weights minus loss without, nats per "
        f"token, ± two standard errors over novels: {shown}; over streaming of equal bytes: "
        f"{over_streaming(r, 'weighted', True)}"
    ), by_all(helped)


def over_streaming(r: Results, word: str, with_word: bool) -> str:
    """The losses of the cases whose names have the word, or of those that do not."""
    rows = {
        name: row
        for name, row in r["rows"].items()
        if name != "streaming" and (word in name) == with_word
    }
    each = lambda x: f"{x['cached']:.0f} cached, {x['tokens'][1]:,} tokens read"  # noqa: E731
    return listed(rows, lambda x: f"{over_base(x)[1:-1]} ({each(x)})")


@claim("sampled", "Reservoir sampling is as fast as StreamingLLM",
       "section 7, no figure: efficiency does not decline")  # fmt: skip
def as_fast(r: Results) -> Finding:
    ratio = {name: r["token"]["ratio"][name] for name in ("reservoir", "stratified")}
    return (
        f"{OURS} on a CPU, {r['token']['slots']} slots, time of a generated token over that of "
        f"streaming: {listed(ratio, spread)}"
    ), grade(ratio["reservoir"]["median"] <= 1.05)


def answers(
    r: Results, names: Iterable[str], among: Callable[[int], bool]
) -> dict[str, list[float]]:
    """By policy and trained model, the share of right answers over the distances `among`."""
    return {
        name: [
            mean(x for distance, x in right.items() if among(int(distance)))
            for right in pick(r, f"seeds/*/within/{name}/right").values()
        ]
        for name in names
    }


def beyond(r: Results) -> Callable[[int], bool]:
    return lambda distance: distance > r["slots"]


def about(r: Results) -> str:
    return (
        f"associative recall, {r['slots']} slots, right answers to facts more than {r['slots']} "
        f"tokens back, {models(r)}"
    )


def models(r: Results) -> str:
    return f"mean (minimum to maximum) of {len(r['seeds'])} trained models"


def of_seeds(x: list[float]) -> str:
    return f"{mean(x):.2f}" + (f" ({min(x):.2f} to {max(x):.2f})" if len(x) > 1 else "")
