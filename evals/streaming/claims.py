"""StreamingLLM's claims about a trained model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from jaxkv.evals.lib.claim import (
    OPEN,
    Claim,
    Finding,
    Results,
    adder,
    by_all,
    grade,
    joined,
    over_base,
    pick,
    spread,
)

BASE = "streaming:sinks=4,window=252"
WINDOW = "streaming:sinks=0,window=256"
STREAMING: list[Claim] = []
claim = adder(STREAMING)
Gap = Callable[[str], list[float]]


@claim("endless", "Stable loss over 4 million tokens",
       "Figure 5: flat perplexity, ten models of 2.8B to 70B")  # fmt: skip
def stable(r: Results) -> Finding:
    s = r["summary"]
    grown = s["resident_bytes"]["growth"] / 2**20
    flat = s["worst_change"] <= 0.005 and s["worst_change_wrapped"] <= 0.005 and not s["not_finite"]
    return (
        f"{r.get('model', 'stories260K')}, {r['policy']}, {r['tokens']:,} tokens of novels: of "
        f"{len(r['endless'])} blocks of {r['block']:,}, the largest difference from the loss "
        f"with a new cache is {s['worst_change']:.2%} ({s['worst_change_wrapped']:.2%} in a stream "
        f"across position 2^32); {s['not_finite']} losses not finite; memory grew by "
        f"{grown:.1f} MiB"
    ), grade(flat)


@claim("latency", "A token is up to 22.2x as fast as with re-computation of a sliding window",
       "Figure 10: Llama-2 7B and 13B, caches of 256 to 4096, one A6000")  # fmt: skip
def recomputing(r: Results) -> Finding:
    rows = r["recompute"]["table"]
    shown = ", ".join(f"{row['cache']}: {row['times_faster']['median']:.1f}x" for row in rows)
    return (
        f"random 110M Llama on a CPU, by cache size {shown} (re-computation with the faster of the "
        "forward passes of jaxkv and transformers)"
    ), grade(r["recompute"]["most"] >= 22.2, part=True)


@claim("latency", "The time per token does not grow with the text",
       "section 1: constant memory and time")  # fmt: skip
def steady(r: Results) -> Finding:
    name, found = list(r["seen"]["ratio"].items())[-1]
    return (
        f"stories260K: a token after {int(name):,} takes {spread(found, 3)} of the time of one "
        "after 1,000"
    ), grade(found["median"] <= 1.05)


def label(policy: str) -> str:
    """4+252 for streaming, as the paper writes it."""
    name, _, fields = policy.partition(":")
    if name != "streaming":
        return "re-computation" if name.startswith("recompute") else name
    values = dict(field.split("=") for field in fields.split(","))
    where = " absolute" if values.get("positions") == "absolute" else ""
    return f"{values['sinks']}+{values['window']}{where}"


def ring(sinks: int, size: int) -> str:
    return f"streaming:sinks={sinks},window={size - sinks}"


def perplexity_claim(
    says: str, paper: str, policies: list[str], rule: Callable[[Gap, Results], str],
    table: str = "perplexity", note: str = "",
) -> None:  # fmt: skip
    """A claim about perplexities in the record `sinks`.

    rule: the verdict, a function of each policy's loss minus the base by text, and of the results.
    """

    @claim("sinks", says, paper)
    def find(r: Results) -> Finding:
        parts = []
        for text, found in r["texts"].items():
            lines = [
                f"{label(policy)} {line['perplexity']:.2f}"
                + (f" {over_base(line)}" if policy != BASE else "")
                for policy in policies
                for line in [found[table][policy]]
            ]
            size = found["predictions" if table == "perplexity" else "predictions_of_beginning"]
            parts.append(f"{text}, {size:,} tokens: {', '.join(lines)}")
        gap = lambda policy: list(pick(r, f"texts/*/{table}/{policy}/loss_over_base").values())  # noqa: E731
        return f"stories260K; {joined(parts)}{note}", rule(gap, r)


def larger_is_worse(gap: Gap, r: Results) -> str:
    return by_all([any(b > a for a, b in pairwise(o)) for o in zip(*map(gap, SIZES), strict=True)])


SIZES = [ring(4, size) for size in (64, 128, 256, 512)]
COUNTS = [ring(sinks, 256) for sinks in (0, 1, 2, 4, 8)]
NEWLINES = "4 newlines in place of the first tokens"
perplexity_claim(
    "Full attention fails beyond the trained length", "Figure 3", ["full", BASE],
    lambda gap, r: grade(min(gap("full")) > 0.1), "beginning", "; trained on 512",
)  # fmt: skip
perplexity_claim(
    "A window alone collapses once it has evicted the first tokens",
    "Table 1, Llama-2-13B, 65K tokens: 0+1024 gives 5158, 4+1020 gives 5.40", [WINDOW, BASE],
    lambda gap, r: grade(min(gap(WINDOW)) > 0.1), note="; this model has no sink",
)  # fmt: skip
perplexity_claim(
    "A window with sinks is as good as re-computation", "Table 1: 5.40 against 5.43",
    [BASE, "recompute:window=256"],
    lambda gap, r: grade(max(map(abs, gap("recompute:window=256"))) < 0.02), "beginning",
)  # fmt: skip
perplexity_claim(
    "The first tokens matter by position, not by meaning: newlines are as good",
    "Table 1: 5.60 against 5.40", [BASE, NEWLINES, WINDOW],
    lambda gap, r: (f"{OPEN}: needs a model with sinks" if min(gap(WINDOW)) < 0.1
                    else grade(max(map(abs, gap(NEWLINES))) < 0.1)),
    note="; the window did not collapse, so the claim cannot be tested",
)  # fmt: skip


@claim("sinks", "Attention beyond the two lowest layers goes to the first tokens", "Figure 2")
def attention_on_first(r: Results) -> Finding:
    layers = r["attention_on_first_token"]
    return (
        "stories260K, mean attention on the first token by layer "
        + ", ".join(f"{100 * x:.2f} %" for x in layers)
        + f"; even attention would give {100 * r['even_attention']:.2f} %"
    ), grade(min(layers[2:]) > 3 * r["even_attention"])


perplexity_claim(
    "One or two sinks are too few, four are enough, more add little",
    "Table 2, Llama-2-7B, 400K tokens, 0/1/2/4/8: 3360/11.88/10.51/9.59/9.54", COUNTS,
    lambda gap, r: grade(min(min(gap(policy)) for policy in COUNTS[:3]) > 0.02),
)  # fmt: skip
perplexity_claim(
    "A larger cache is not always better",
    "Table 6, Llama-2-7B, 4+508/1020/2044/4092: 9.73/9.32/9.08/9.59", SIZES, larger_is_worse,
)  # fmt: skip
perplexity_claim(
    "Positions must be those within the cache, not those in the text", "section 3.2",
    [BASE, f"{BASE},positions=absolute"],
    lambda gap, r: grade(min(gap(f"{BASE},positions=absolute")) > 0.1),
)  # fmt: skip
perplexity_claim(
    "Evicting after attention, so that a query sees one more key, changes nothing",
    "done by the published code; section 3.2 suggests otherwise", [BASE, ring(4, 257)],
    lambda gap, r: grade(max(map(abs, gap(ring(4, 257)))) < 0.002),
    note="; our 4+253 is their 4+252",
)  # fmt: skip
STREAMING += [
    Claim("Streamed questions are answered as well as single ones; a window alone fails",
          "Table 5, ARC-E, Llama-2-7B-chat: 71.34 against 71.25; window 3.58", "",
          "a chat model with billions of weights"),
    Claim("Answers within the cache are found, and none beyond it",
          "StreamEval, cache 2048: 85.8 % at distance 460, 0 % at 2300", "",
          "an instruction-tuned model with billions of weights"),
]  # fmt: skip
