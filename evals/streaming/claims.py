"""StreamingLLM's claims about a trained model: SmolLM2-135M-Instruct, where it can show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from jaxkv.evals.lib.claim import (
    OPEN,
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
from jaxkv.evals.lib.measured_on import RANDOM, STORIES
from jaxkv.evals.lib.record import standard_error
from jaxkv.evals.streaming import tables
from jaxkv.evals.streaming.tables import ABSOLUTE, BASE, label
from jaxkv.evals.tasks.score import GATE

STREAMING: list[Claim] = []
claim = adder(STREAMING)
Gap = Callable[[str, str], list[float]]
SAME = 0.02  # nats: a smaller mean difference counts as none
FAILS = 0.1  # nats: a larger one counts as failure
LITTLE = 0.1  # of all answers: a smaller share counts as none
QUESTION = 40  # tokens of a question and of what it asks about, at most


def losses_claim(
    says: str, paper: str, shown: Mapping[str, Sequence[str]], rule: Callable[[Gap], str],
    note: str = "",
) -> None:  # fmt: skip
    """A claim about losses in the record `streaming_tables`.

    shown: paths of tables in the results, and the rows of each that are shown. rule: the verdict, a
    function of the losses minus the base's, one per text, by path and row.
    """

    @claim("streaming_tables", says, paper)
    def find(r: Results) -> Finding:
        parts = []
        for path, names in shown.items():
            table = pick(r, path)
            first, last = table["tokens"]
            rows = (
                f"{name} {row['perplexity']:.2f}"
                + (f" {over_base(row)}" if any(row["loss_over_base_by_text"]) else "")
                for name in names
                for row in [table["rows"][name]]
            )
            parts.append(f"tokens {first:,} to {last:,}: {', '.join(rows)}")
        gap = lambda path, name: pick(r, path)["rows"][name]["loss_over_base_by_text"]  # noqa: E731
        return f"{r['model']}, {len(r['texts'])} novels; {joined(parts)}{note}", rule(gap)


SIZES = {f"tables/{size}": size for size in tables.SIZES}
OTHERS, WITHIN, BEYOND = "others", "within_context", "beyond_context"


def two_errors(gaps: list[float]) -> tuple[float, float]:
    """The mean over texts minus and plus two standard errors."""
    error = standard_error(gaps)
    room = math.inf if error is None else 2 * error  # one text shows nothing
    return float(np.mean(gaps)) - room, float(np.mean(gaps)) + room


def sinks_needed(gap: Gap) -> str:
    """All of it, or only that four are enough."""
    few = [min(gap(path, label(n, size))) for path, size in SIZES.items() for n in (1, 2)]
    more = [
        abs(end) for path, size in SIZES.items() for end in two_errors(gap(path, label(8, size)))
    ]
    return grade(min(few) > SAME and max(more) < SAME, max(more) < SAME)


losses_claim(
    "Full attention fails beyond the trained length", "Figure 3", {BEYOND: ["full", BASE]},
    lambda gap: grade(min(gap(BEYOND, "full")) > FAILS),
)  # fmt: skip
losses_claim(
    "A window alone collapses once it has evicted the first tokens",
    "Table 1, Llama-2-13B, 65K tokens: 0+1024 gives 5158, 4+1020 gives 5.40",
    {path: [label(0, size), label(4, size)] for path, size in SIZES.items()},
    lambda gap: by_all([min(gap(path, label(0, size))) > FAILS for path, size in SIZES.items()]),
)  # fmt: skip
losses_claim(
    "With sinks it is as good as re-computation", "Table 1: 5.40 against 5.43",
    {OTHERS: [BASE, "re-computation"], "larger": [*tables.LARGER]},
    lambda gap: by_all([
        min(two_errors(gap(path, name))) > -SAME
        for path, name in ((OTHERS, "re-computation"), ("larger", tables.LARGE))
    ]),
    note="; re-computation predicts every 64th or 128th token, and is compared with four sinks in "
    "a cache of its size at these tokens; it must be at most 0.02 nats lower, two standard errors "
    "included",
)  # fmt: skip
losses_claim(
    "The first tokens matter by position, not by meaning: newlines are as good",
    "Table 1: 5.60 against 5.40",
    {OTHERS: [BASE, "4 newlines+252", "newline+255", "<|endoftext|>+255"]},
    lambda gap: grade(max(gap(OTHERS, "4 newlines+252")) < 0.04),
)  # fmt: skip
losses_claim(
    "One or two sinks are too few, four are enough, more add little",
    "Table 2, Llama-2-7B, 400K tokens, 0/1/2/4/8: 3360/11.88/10.51/9.59/9.54",
    {path: [label(n, size) for n in tables.COUNTS] for path, size in SIZES.items()},
    sinks_needed,
)  # fmt: skip
CACHES = [*tables.TABLE_6]
losses_claim(
    "A larger cache is not always better",
    "Table 6, Llama-2-7B, 4+508/1020/2044/4092: 9.73/9.32/9.08/9.59", {"table_6": CACHES},
    lambda gap: grade(
        any(min(np.subtract(gap("table_6", b), gap("table_6", a))) > 0 for a, b in pairwise(CACHES))
    ),
)  # fmt: skip
losses_claim(
    "Positions must be those within the cache, not those in the text", "section 3.2",
    {WITHIN: [BASE, ABSOLUTE], BEYOND: [BASE, ABSOLUTE]},
    lambda gap: by_all([min(gap(path, ABSOLUTE)) > FAILS for path in (WITHIN, BEYOND)]),
    note="; within the trained context and beyond it",
)  # fmt: skip
losses_claim(
    "Evicting after attention, so that a query sees one more key, changes nothing",
    "done by the published code; section 3.2 suggests otherwise", {OTHERS: [BASE, "4+253"]},
    lambda gap: grade(max(map(abs, gap(OTHERS, "4+253"))) < 0.002),
    note="; our 4+253 is their 4+252",
)  # fmt: skip


@claim("attention_maps", "Attention beyond the two lowest layers goes to the first tokens",
       "Figure 2: over half of the attention, Llama-2-7B")  # fmt: skip
def attention_on_first(r: Results) -> Finding:
    layers = np.array(r["first_token"]["by_layer"])
    above = int((layers > 3 * r["even_attention"]).sum())
    return (
        f"{r['model']}, {len(r['texts'])} novels, mean attention on the first token by layer "
        + ", ".join(f"{100 * x:.1f}" for x in layers)
        + f" %; even attention would give {100 * r['even_attention']:.2f} %. "
        f"{r['first_token']['heads_above_share']:.0%} of the heads give it more than 0.3; by the "
        f"metric of Gu et al. (2025), {r['sink_metric']:.1%} are sink heads"
    ), grade(above == len(layers) - 2 and min(layers[2:]) > 3 * r["even_attention"], above > 0)


@claim("endless_135m", "Stable loss over 4 million tokens",
       "Figure 5: flat perplexity, ten models of 2.8B to 70B")  # fmt: skip
@claim("endless", "Stable loss over 4 million tokens",
       "Figure 5: flat perplexity, ten models of 2.8B to 70B")  # fmt: skip
def stable(r: Results) -> Finding:
    s = r["summary"]
    resident = (s["resident_bytes"]["max"] - s["resident_bytes"]["min"]) / 2**20
    state = " and ".join(f"{size / 2**20:.1f} MiB" for size in s["state_bytes"])
    flat = s["worst_change"] <= 0.005 and s["worst_change_wrapped"] <= 0.005 and not s["not_finite"]
    return (
        f"{r.get('model', 'stories260K')}, {r['policy']}, {r['tokens']:,} tokens of novels: of "
        f"{len(r['endless'])} blocks of {r['block']:,}, the largest difference from the loss "
        f"with a new cache is {s['worst_change']:.2%} ({s['worst_change_wrapped']:.2%} in a stream "
        f"across position 2^32); {s['not_finite']} losses not finite; the state has {state} in "
        "every block, and after the first block the memory of the process varies by "
        f"{resident:.1f} MiB"
    ), grade(flat and r["tokens"] >= 4_000_000, flat)


@claim("latency", "A token is up to 22.2x as fast as with re-computation of a sliding window",
       "Figure 10: Llama-2 7B and 13B, caches of 256 to 4096, one A6000",
       model=f"{RANDOM} (110M)")  # fmt: skip
def recomputing(r: Results) -> Finding:
    rows = r["recompute"]["table"]
    shown = ", ".join(f"{row['cache']}: {row['times_faster']['median']:.1f}x" for row in rows)
    return (
        f"random 110M Llama on a CPU, by cache size {shown} (re-computation with the faster of the "
        "forward passes of jaxkv and transformers)"
    ), grade(r["recompute"]["most"] >= 22.2, part=True)


@claim("latency", "The time per token does not grow with the text",
       "section 1: constant memory and time", model=STORIES)  # fmt: skip
def steady(r: Results) -> Finding:
    name, found = list(r["seen"]["ratio"].items())[-1]
    return (
        f"stories260K: a token after {int(name):,} takes {spread(found, 3)} of the time of one "
        "after 1,000"
    ), grade(found["median"] <= 1.05)


@claim("questions", "Streamed questions are answered as well as single ones; a window alone fails",
       "Table 5, ARC-E, Llama-2-7B-chat: 71.34 against 71.25; window 3.58")  # fmt: skip
def streamed_questions(r: Results) -> Finding:
    """Paired with controls that have the same solved questions before them.

    Below the gate of full attention the row shows only that the stream costs nothing, or how much.
    """
    right, shown = r["right"], []
    if "full" not in right:
        return "", f"{OPEN}: needs a run with the controls"
    for name in ("4+252", "0+256"):
        gaps = listed(right[name]["minus"], _gap)
        shown.append(f"{name} {right[name]['share']:.1%} (minus {gaps})")
    low, high = _bounds(right["4+252"]["minus"]["reread"]), _bounds(right["0+256"]["minus"]["full"])
    full = right["full"]["share"]
    below = "" if full >= GATE else f"; below the gate: full attention answers {full:.0%}"
    return (
        f"{r['model']}, {r['questions']} questions of ARC-E in a stream of {r['tokens']:,} tokens, "
        f"choices by likelihood, guessing gives {r['chance']:.0%}; full attention to the stream "
        f"{full:.1%} (the first {r['questions_of_full']}), to the last {r['reread']} tokens read "
        f"again {right['reread']['share']:.1%}, to each question alone "
        f"{right['alone']['share']:.1%}; {joined(shown)}{below}"
    ), UNSEEN if below else grade(low[1] >= 0 and high[1] < 0, low[1] >= 0)


def _bounds(x: Results) -> tuple[float, float]:
    """The mean minus and plus two standard errors."""
    return x["mean"] - 2 * x["standard_error"], x["mean"] + 2 * x["standard_error"]


def _gap(x: Results) -> str:
    return f"{x['mean']:+.1%} ± {2 * x['standard_error']:.1%}"


@claim("stream_eval", "Answers within the cache are found, and none beyond it",
       "StreamEval, cache 2048: 85.8 % at distance 460, 0 % at 2300")  # fmt: skip
def found_within_cache(r: Results) -> Finding:
    """Distances that the gate lets pass; within the cache as full attention, beyond it nothing."""
    gate, right = pick(r, "gate/*/mean"), pick(r, "right/streaming/*/mean")
    open_ = [distance for distance, share in gate.items() if share >= GATE]
    near = [right[d] > gate[d] - LITTLE for d in open_ if int(d) + QUESTION <= r["cache"]]
    far = [right[d] < LITTLE for d in open_ if int(d) > r["cache"]]
    rows = {"gate": r["gate"], **r["right"]}
    shown = joined(
        f"{distance}: " + listed({name: row[distance] for name, row in rows.items()}, _share)
        for distance in r["gate"]
    )
    verdict = grade(all(near + far), all(near)) if near and far else UNSEEN
    return (
        f"{r['model']}, {len(r['texts'])} novels of {r['tokens']:,} tokens, a number every "
        f"{r['every']}, caches of {r['cache']}, {r['questions']} questions per novel and distance; "
        f"gate: full attention to at most {r['gate_tokens']:,} tokens; tokens since the number, "
        f"{shown}"
    ), verdict


def _share(x: Results) -> str:
    return f"{x['mean']:.0%} ± {x['two_errors']:.0%}"
