"""StreamingLLM's claims about a trained model: what its records say of each."""

from __future__ import annotations

from itertools import pairwise

from jaxkv.evals.lib.claim import HOLDS, NOT, OPEN, PART, Claim, Finding, Results, by_all, over_base

BASE = "streaming:sinks=4,window=252"


def endless(r: Results) -> Finding:
    s = r["summary"]
    grown = s["resident_bytes"]["growth"] / 2**20
    flat = s["worst_change"] <= 0.005 and s["worst_change_wrapped"] <= 0.005 and not s["not_finite"]
    return (
        f"stories260K, {r['policy']}, {r['tokens']:,} tokens of novels: of {len(r['endless'])} "
        f"blocks of {r['block']:,} the one farthest from the same tokens read afresh is "
        f"{s['worst_change']:.2%} away ({s['worst_change_wrapped']:.2%} in a stream across "
        f"position 2^32); {s['not_finite']} losses not finite; memory grew by {grown:.1f} MiB",
        HOLDS if flat else NOT,
    )


def recomputing(r: Results) -> Finding:
    rows = r["recompute"]["table"]
    shown = ", ".join(f"{row['cache']}: {row['times_faster']['median']:.1f}x" for row in rows)
    return (
        f"random 110M Llama on a CPU, by size of the cache {shown} (re-computation by the faster "
        "of our forward and transformers')",
        HOLDS if r["recompute"]["most"] >= 22.2 else PART,
    )


def steady(r: Results) -> Finding:
    name, found = list(r["seen"]["ratio"].items())[-1]
    return (
        f"stories260K: a token after {int(name):,} takes {found['median']:.3f} "
        f"({found['min']:.3f} to {found['max']:.3f}) of the time of one after 1,000",
        HOLDS if found["median"] <= 1.05 else NOT,
    )


def perplexities(r: Results, table: str, *policies: str) -> str:
    """Perplexity of some policies on every text, with how far the loss lies from the base."""
    parts = []
    for text, found in r["texts"].items():
        lines = []
        for policy in policies:
            line = found[table][policy]
            gap = f" {over_base(line)}"
            lines.append(f"{label(policy)} {line['perplexity']:.2f}{gap if policy != BASE else ''}")
        size = found["predictions" if table == "perplexity" else "predictions_of_beginning"]
        parts.append(f"{text}, {size:,} tokens: {', '.join(lines)}")
    return "stories260K; " + "; ".join(parts)


def label(policy: str) -> str:
    """4+252 for streaming, as the paper writes it."""
    name, _, fields = policy.partition(":")
    if name != "streaming":
        return "re-computation" if name.startswith("recompute") else name
    values = dict(field.split("=") for field in fields.split(","))
    where = " absolute" if values.get("positions") == "absolute" else ""
    return f"{values['sinks']}+{values['window']}{where}"


def gap(r: Results, policy: str, table: str = "perplexity") -> list[float]:
    """By how much the loss exceeds the base, in each text."""
    return [found[table][policy]["loss_over_base"] for found in r["texts"].values()]


def window_collapses(r: Results) -> Finding:
    policy = "streaming:sinks=0,window=256"
    return (
        perplexities(r, "perplexity", policy, BASE) + "; this model has no sink to lose",
        HOLDS if min(gap(r, policy)) > 0.1 else NOT,
    )


def restores(r: Results) -> Finding:
    policy = "recompute:window=256"
    near = max(map(abs, gap(r, policy, "beginning"))) < 0.02
    return perplexities(r, "beginning", BASE, policy), HOLDS if near else NOT


def newlines(r: Results) -> Finding:
    window, policy = "streaming:sinks=0,window=256", "4 newlines in place of the first tokens"
    text = perplexities(r, "perplexity", BASE, policy, window)
    if min(gap(r, window)) < 0.1:
        return (
            text + "; nothing collapsed that they could restore",
            f"{OPEN}: needs a model with sinks",
        )
    return text, HOLDS if max(map(abs, gap(r, policy))) < 0.1 else NOT


def few_sinks(r: Results) -> Finding:
    policies = [f"streaming:sinks={n},window={256 - n}" for n in (0, 1, 2, 4, 8)]
    needed = min(min(gap(r, policy)) for policy in policies[:3]) > 0.02
    return perplexities(r, "perplexity", *policies), HOLDS if needed else NOT


def cache_sizes(r: Results) -> Finding:
    policies = [f"streaming:sinks=4,window={size - 4}" for size in (64, 128, 256, 512)]
    orders = [[t["perplexity"][p]["perplexity"] for p in policies] for t in r["texts"].values()]
    rising = [any(b > a for a, b in pairwise(o)) for o in orders]
    return perplexities(r, "perplexity", *policies), by_all(rising)


def dense_fails(r: Results) -> Finding:
    return (
        perplexities(r, "beginning", "full", BASE) + "; trained on 512",
        HOLDS if min(gap(r, "full", "beginning")) > 0.1 else NOT,
    )


def cache_positions(r: Results) -> Finding:
    policy = f"{BASE},positions=absolute"
    return (
        perplexities(r, "perplexity", BASE, policy),
        HOLDS if min(gap(r, policy)) > 0.1 else NOT,
    )


def one_more_key(r: Results) -> Finding:
    policy = "streaming:sinks=4,window=253"
    near = max(map(abs, gap(r, policy))) < 0.002
    return (
        perplexities(r, "perplexity", BASE, policy) + "; our 4+253 is their 4+252",
        HOLDS if near else NOT,
    )


def attention_on_first(r: Results) -> Finding:
    layers = r["attention_on_first_token"]
    return (
        "stories260K, mean attention on the first token by layer "
        + ", ".join(f"{100 * x:.2f} %" for x in layers)
        + f"; spread evenly it would be {100 * r['even_attention']:.2f} %",
        HOLDS if min(layers[2:]) > 3 * r["even_attention"] else NOT,
    )


STREAMING = [
    Claim("Stable over 4 million tokens", "Figure 5: flat perplexity, ten models of 2.8B to 70B",
          "endless", endless),
    Claim("Up to 22.2x as fast per token as a sliding window with re-computation",
          "Figure 10: Llama-2 7B and 13B, caches of 256 to 4096, one A6000",
          "latency", recomputing),
    Claim("The time per token does not grow with the text",
          "section 1: constant memory and time", "latency", steady),
    Claim("Full attention fails beyond the trained length", "Figure 3", "sinks", dense_fails),
    Claim("A window alone collapses once the first tokens are gone",
          "Table 1, Llama-2-13B, 65K tokens: 0+1024 gives 5158, 4+1020 gives 5.40",
          "sinks", window_collapses),
    Claim("With sinks it is as good as re-computation", "Table 1: 5.40 against 5.43",
          "sinks", restores),
    Claim("The first tokens matter by place, not by meaning: newlines do as well",
          "Table 1: 5.60 against 5.40", "sinks", newlines),
    Claim("Attention beyond the two lowest layers goes to the first tokens", "Figure 2",
          "sinks", attention_on_first),
    Claim("One or two sinks are too few, four are enough, more add little",
          "Table 2, Llama-2-7B, 400K tokens, 0/1/2/4/8: 3360/11.88/10.51/9.59/9.54",
          "sinks", few_sinks),
    Claim("A larger cache is not always better",
          "Table 6, Llama-2-7B, 4+508/1020/2044/4092: 9.73/9.32/9.08/9.59", "sinks", cache_sizes),
    Claim("Positions must be those in the cache, not those in the text", "section 3.2",
          "sinks", cache_positions),
    Claim("Evicting after attending, so that a query sees one key more, changes nothing",
          "the published code does so; section 3.2 reads as if it did not",
          "sinks", one_more_key),
    Claim("Streamed questions are answered as well as one by one, a window alone fails",
          "Table 5, ARC-E, Llama-2-7B-chat: 71.34 against 71.25; window 3.58", "",
          "a chat model of some billion weights"),
    Claim("Answers within the cache are found, beyond it none",
          "StreamEval, cache 2048: 85.8 % at distance 460, 0 % at 2300", "",
          "a model of some billion weights tuned to follow instructions"),
]  # fmt: skip
