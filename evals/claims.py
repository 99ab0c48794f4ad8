"""Writes CLAIMS.md: every row's figures come from a record under evals/results, none is typed.

`python -m evals.claims` after an experiment; `--check` only says whether the page is in step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from evals.palette import ARMS
from evals.record import RESULTS, read

PAGE = Path(__file__).with_name("CLAIMS.md")
HOLDS, PART, NOT, OPEN = "holds", "holds in part", "does not hold here", "not run here"
BASE = "streaming:sinks=4,window=252"
EXPERIMENTS = (
    "agreement", "endless", "sinks", "latency", "startup", "mfu", "backcopy", "sink_tables",
)  # fmt: skip
Finding = tuple[str, str]  # what we measured, at which size; the verdict
Results = dict[str, Any]

HEAD = """\
# Claims

What the papers claim, and what we measured. Written by `python -m evals.claims` from
`evals/results/*.json`, which hold commit, machine, versions, command, data and spread; edit
`evals/claims.py`, not this page. Our models are small: stories260K (260 thousand weights, trained
on TinyStories with a context of 512) and a Llama of 110 million random weights, which has the
size of a real model and nothing to say. `s+w` is a cache of s sinks and a window of w; behind a
perplexity stands by how much the loss exceeds that of 4+252, in nats per token, with two standard
errors.
"""


@dataclass(frozen=True)
class Claim:
    """says: the claim. paper: its figure there. experiment: the record that speaks to it."""

    says: str
    paper: str
    experiment: str
    find: Callable[[Results], Finding] | str  # a string: what it would need


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
            gap = f" ({line['loss_over_base']:+.4f} ± {2 * line['standard_error']:.4f})"
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
    verdict = HOLDS if all(rising) else PART if any(rising) else NOT
    return perplexities(r, "perplexity", *policies), verdict


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


def trained(r: Results, sinks: str) -> list[dict[str, Any]]:
    """The arms of one kind, one a seed."""
    return [arm for arm in r["arms"].values() if arm["recipe"]["sinks"] == sinks]


def size_of(r: Results) -> str:
    arms = r["arms"].values()
    weights, tokens = (max(arm[key] for arm in arms) for key in ("weights", "tokens"))
    seeds = len({arm["recipe"]["seed"] for arm in arms})
    return f"{weights / 1e6:.1f}M weights, {tokens / 1e6:.1f}M tokens of novels, seeds: {seeds}"


def table_3(r: Results, sinks: str) -> tuple[str, list[list[float]]]:
    """What an arm reads with 0, 1, 2 and 4 first tokens in its cache; the losses over 4's."""
    texts, gaps = [], []
    for arm in trained(r, sinks):
        for name, found in arm["perplexity"].items():
            lines = [(key, line) for key, line in found.items() if "+" in key]
            gaps.append([line["loss_over_base"] for _, line in lines])
            shown = ", ".join(
                f"{key} {line['perplexity']:.2f} ({line['loss_over_base']:+.4f} ± "
                f"{2 * line['standard_error']:.4f})"
                for key, line in lines
            )
            texts.append(f"{name}, {found['predictions']:,} tokens: {shown}")
    return f"{size_of(r)}; " + "; ".join(texts), gaps


def several_needed(sinks: str) -> Callable[[Results], Finding]:
    """Without its first token a cache is worse, and with one of them it still is."""

    def find(r: Results) -> Finding:
        text, gaps = table_3(r, sinks)
        needed = [all(gap[n] > 0.02 for gap in gaps) for n in (0, 1)]
        return text, HOLDS if all(needed) else PART if needed[0] else NOT

    return find


def one_enough(r: Results) -> Finding:
    text, gaps = table_3(r, "token")
    enough = all(abs(gap[1]) < 0.02 for gap in gaps)
    needed = all(gap[0] > 0.02 for gap in gaps)
    what = "" if needed else "; this model needs none"
    return text + what, HOLDS if enough and needed else PART if enough else NOT


def loss_unharmed(r: Results) -> Finding:
    losses = {sinks: [arm["valid_loss"] for arm in trained(r, sinks)] for sinks in ARMS}
    shown = ", ".join(
        f"{sinks} " + " ".join(f"{loss:.4f}" for loss in found)
        for sinks, found in losses.items()
        if found
    )
    harm = min(losses["token"]) - max(losses["none"])
    return f"{size_of(r)}; valid loss: {shown}", HOLDS if harm < 0.02 else NOT


def tasks_unharmed(r: Results) -> Finding:
    (plain, *_), (token, *_) = trained(r, "none"), trained(r, "token")
    parts, worse = [], []
    for task, one in token["zeroshot"].items():
        other = plain["zeroshot"][task]
        error = 2 * (one["standard_error"] ** 2 + other["standard_error"] ** 2) ** 0.5
        worse.append(other["accuracy"] - one["accuracy"] > max(error, 0.01))
        parts.append(
            f"{task} {100 * other['accuracy']:.1f} to {100 * one['accuracy']:.1f} "
            f"(± {100 * error:.1f}, chance {100 * one['chance']:.0f})"
        )
    return f"{size_of(r)}; from none to token, %: " + ", ".join(parts), NOT if any(worse) else HOLDS


def small_table(r: Results, *arms: str) -> str:
    """Table 3 of the smallest models: medians over the seeds, and the range."""
    parts = []
    for arm in arms:
        found = r["arms"][arm]["summary"]
        shown = ", ".join(
            f"{key} {line['median']:+.3f} ({line['min']:+.3f} to {line['max']:+.3f})"
            for key, line in found["loss_over_base"].items()
        )
        parts.append(f"{arm}: {shown}")
    seeds = r["arms"][arms[0]]["summary"]["first_token"]["n"]
    return f"one layer, one head, seeds: {seeds}; loss over that of 4+20: " + "; ".join(parts)


def small_one_enough(r: Results) -> Finding:
    token = r["arms"]["token"]["summary"]["loss_over_base"]
    holds = (
        token["0+24"]["min"] > 0.02 and max(abs(token["1+23"][k]) for k in ("min", "max")) < 0.02
    )
    return small_table(r, "token", "none", "zero", "logit"), HOLDS if holds else NOT


def small_two_needed(r: Results) -> Finding:
    over = r["arms"]["two_tokens"]["summary"]["loss_over_base"]
    return small_table(r, "two_tokens"), HOLDS if over["1+23"]["min"] > 0.02 else NOT


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
    Claim("Trained with plain softmax, a model needs several of its first tokens",
          "Table 3, 160M, 0/1/2/4 of 1024: 27.87/18.49/18.05/18.05",
          "sink_tables", several_needed("none")),
    Claim("Trained with a zero sink, it needs some as well",
          "Table 3: 29214/19.90/18.27/18.01", "sink_tables", several_needed("zero")),
    Claim("A learnable sink token in training makes one sink enough",
          "Table 3: 1235/18.01/18.01/18.02", "sink_tables", one_enough),
    Claim("The same where a head has nothing to do most of the time",
          "Table 3; the stream is that of Guo et al. 2024 (arXiv 2410.13835)",
          "backcopy", small_one_enough),
    Claim("Two sink tokens are then both needed", "appendix: no gain from a second",
          "backcopy", small_two_needed),
    Claim("A sink token in training does the loss no harm", "Figure 6", "sink_tables",
          loss_unharmed),
    Claim("A sink token in training does no harm elsewhere", "Table 4, seven tasks",
          "sink_tables", tasks_unharmed),
]  # fmt: skip


def page(folder: Path = RESULTS) -> str:
    """CLAIMS.md as the records have it now."""
    found = [name for name in EXPERIMENTS if (folder / f"{name}.json").exists()]
    records = {name: read(name, folder) for name in found}
    lines = [
        HEAD,
        "## StreamingLLM (Xiao et al. 2024, arXiv 2309.17453)",
        "",
        "| claim | paper | measured here | verdict | record |",
        "| --- | --- | --- | --- | --- |",
        *(row(claim, records) for claim in STREAMING),
        "",
        "## What was asked of correctness and speed",
        "",
        "Times are medians with the range over the rounds; the variants of a bar took turns in one "
        "process.",
        "",
        "| bar | measured | asked | met | record |",
        "| --- | --- | --- | --- | --- |",
        *(line for name in records for line in bars(name, records[name])),
        "",
        "## Records",
        "",
        *(f"- {link(name)}: {made(record)}" for name, record in records.items()),
    ]
    return "\n".join(lines) + "\n"


def row(claim: Claim, records: dict[str, Any]) -> str:
    if isinstance(claim.find, str):
        found, where = ("", f"{OPEN}: needs {claim.find}"), ""
    elif claim.experiment not in records:
        found, where = ("", f"{OPEN}: needs a run"), f"`python -m evals.{claim.experiment}`"
    else:
        found, where = claim.find(records[claim.experiment]["results"]), link(claim.experiment)
    return f"| {claim.says} | {claim.paper} | {found[0]} | {found[1]} | {where} |"


def bars(name: str, record: dict[str, Any]) -> list[str]:
    """A line for everything that was asked of an experiment."""
    lines = []
    for bar in record["results"].get("bars", []):
        value = bar["value"]
        if isinstance(value, dict):
            value = f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"
        else:
            value = f"{value:.3g}"
        met = "yes" if bar["met"] else "**no**"
        lines.append(f"| {bar['bar']} | {value} | {bar['ask']} | {met} | {link(name)} |")
    return lines


def made(record: dict[str, Any]) -> str:
    """The command of a record, and where and when it ran."""
    cpu = record["cpu"]
    changed = " with changes" if record["dirty"] else ""
    return (
        f"`{record['command']}`; {record['date'][:10]}, commit {record['commit'][:7]}{changed}, "
        f"{cpu['cores']} cores of {cpu['model']}, load {cpu['load']:.1f} at the start"
    )


def link(name: str) -> str:
    return f"[{name}](results/{name}.json)"


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m evals.claims", description=__doc__)
    ask.add_argument("--check", action="store_true", help="write nothing, fail if out of step")
    if ask.parse_args().check:
        if PAGE.read_text("utf-8") != page():
            raise SystemExit("CLAIMS.md is out of step; run python -m evals.claims")
        return
    PAGE.write_text(page(), "utf-8")
    print("wrote", PAGE.name)


if __name__ == "__main__":
    main()
