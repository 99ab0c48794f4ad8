"""StreamingLLM's claims about training with sinks (section 3.3): what the records say of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxkv.evals.lib.claim import HOLDS, NOT, OPEN, PART, UNSEEN, Claim, Finding, Results, over_base
from jaxkv.evals.palette import ARMS

FELT = 0.02  # nats a token: a difference of losses that counts as one
NOBODY_LEANS = f"{UNSEEN}: no model of this size leans on its first tokens"


def claims(experiment: str) -> list[Claim]:
    """The claims of section 3.3, as one record of trained arms has them."""
    every = (
        ("Trained with plain softmax, a model needs several of its first tokens",
         "Table 3, 160M, 0/1/2/4 of 1024: 27.87/18.49/18.05/18.05", ["none"], several_needed),
        ("Trained with a zero sink, it still leans on its first tokens",
         "Table 3: 29214/19.90/18.27/18.01", ["zero"], zero_needs_some),
        ("A learnable sink token in training makes one sink enough",
         "Table 3: 1235/18.01/18.01/18.02", ["none", "token"], one_enough),
        ("A sink token in training does the loss no harm", "Figure 6", ["none", "token"],
         loss_unharmed),
        ("A sink token in training does no harm elsewhere", "Table 4, seven tasks",
         ["none", "token"], tasks_unharmed),
    )  # fmt: skip
    return [Claim(says, paper, experiment, given(arms, find)) for says, paper, arms, find in every]


def given(arms: list[str], find: Callable[[Results], Finding]) -> Callable[[Results], Finding]:
    """The same finding, open where the record lacks an arm it compares."""

    def found(r: Results) -> Finding:
        missing = [arm for arm in arms if not trained(r, arm)]
        return ("", f"{OPEN}: needs the arms {', '.join(missing)}") if missing else find(r)

    return found


def trained(r: Results, sinks: str) -> dict[int, dict[str, Any]]:
    """The arms of one kind, by their seeds."""
    arms = [arm for arm in r["arms"].values() if arm["recipe"]["sinks"] == sinks]
    return {arm["recipe"]["seed"]: arm for arm in arms}


def pairs(r: Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Plain softmax and sink token, of equal seeds."""
    plain, token = trained(r, "none"), trained(r, "token")
    return [(plain[seed], token[seed]) for seed in sorted(plain.keys() & token.keys())]


def size_of(r: Results) -> str:
    """What the arms were: alike but for their sinks, and for the weights that these take."""
    arms = list(r["arms"].values())
    weights = max(arm["weights"] for arm in arms) / 1e6
    seeds = len({arm["recipe"]["seed"] for arm in arms})
    return (
        f"{weights:.1f}M weights, {arms[0]['tokens'] / 1e6:.1f}M tokens of training, seeds: {seeds}"
    )


def gaps(r: Results, sinks: str) -> list[list[float]]:
    """Of every model and text, by how much the loss with 0, 1, 2 and 4 sinks exceeds that of 4."""
    return [
        [line["loss_over_base"] for key, line in text.items() if "+" in key]
        for arm in trained(r, sinks).values()
        for text in arm["perplexity"].values()
    ]


def table_3(r: Results, sinks: str) -> str:
    """What the arms of one kind read with 0, 1, 2 and 4 first tokens in their caches."""
    parts = [size_of(r)]
    for arm in trained(r, sinks).values():
        for name, text in arm["perplexity"].items():
            shown = ", ".join(
                f"{key} {line['perplexity']:.2f} {over_base(line)}"
                for key, line in text.items()
                if "+" in key
            )
            parts.append(f"{sinks}, {name}, {text['predictions']:,} tokens: {shown}")
    return "; ".join(parts)


def several_needed(r: Results, sinks: str = "none") -> Finding:
    """Without its first token a cache is worse, and with one of them it still is."""
    found = gaps(r, sinks)
    needed = [all(gap[kept] > FELT for gap in found) for kept in (0, 1)]
    return table_3(r, sinks), HOLDS if all(needed) else PART if needed[0] else NOT


def zero_needs_some(r: Results) -> Finding:
    """The same of a zero sink. Whether by more or less than plain softmax's is shown and not
    judged: in the paper it is both."""
    if all(abs(gap[0]) < FELT for gap in gaps(r, "zero")):
        return table_3(r, "zero"), NOBODY_LEANS
    return several_needed(r, "zero")


def one_enough(r: Results) -> Finding:
    """One token is needed and enough; all of it only where plain softmax needs more than one."""
    found, plain = gaps(r, "token"), gaps(r, "none")
    enough = all(abs(gap[1]) < FELT for gap in found)
    if all(abs(gap[0]) < FELT for gap in (*found, *plain)):
        return table_3(r, "token"), NOBODY_LEANS
    gained = all(gap[0] > FELT for gap in found) and all(gap[1] > FELT for gap in plain)
    return table_3(r, "token"), HOLDS if enough and gained else PART if enough else NOT


def loss_unharmed(r: Results) -> Finding:
    """At no seed is the sink token's loss on held-back text the larger one by something felt; of
    one seed alone nothing is concluded."""
    shown = ", ".join(
        f"{sinks} " + " ".join(f"{arm['valid_loss']:.4f}" for arm in trained(r, sinks).values())
        for sinks in ARMS
        if trained(r, sinks)
    )
    if not pairs(r):
        return "", f"{OPEN}: needs arms of equal seeds"
    harm = max(token["valid_loss"] - plain["valid_loss"] for plain, token in pairs(r))
    text = f"{size_of(r)}; valid loss: {shown}"
    if len(pairs(r)) < 2:
        return text, f"{UNSEEN}: one seed does not tell harm from chance"
    return text, HOLDS if harm < FELT else NOT


def tasks_unharmed(r: Results) -> Finding:
    """Of the tasks at which a model is better than chance, none is lost beyond two errors."""
    told, judged = [], []
    for plain, token in pairs(r):
        for task, one in token["zeroshot"].items():
            other = plain["zeroshot"][task]
            error = 2 * (one["standard_error"] ** 2 + other["standard_error"] ** 2) ** 0.5
            known = any(x["accuracy"] - x["chance"] > 2 * x["standard_error"] for x in (one, other))
            if known:
                judged.append(other["accuracy"] - one["accuracy"] > error)
            told.append(
                f"{task} {100 * other['accuracy']:.1f} to {100 * one['accuracy']:.1f} "
                f"(± {100 * error:.1f}{'' if known else ', both by chance'})"
            )
    text = f"{size_of(r)}; from none to token, %: " + ", ".join(told)
    if not told:
        return "", f"{OPEN}: needs --zeroshot, and arms of equal seeds"
    if not judged:
        return text, f"{UNSEEN}: no model of this size is better than chance"
    return text, NOT if any(judged) else HOLDS


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
    """The token is needed and enough; plain softmax must need more, or nothing is gained."""
    over = {arm: found["summary"]["loss_over_base"] for arm, found in r["arms"].items()}
    token = over["token"]
    enough = max(abs(token["1+23"][end]) for end in ("min", "max")) < FELT
    held = enough and token["0+24"]["min"] > FELT
    text = small_table(r, "token", "none", "zero", "logit")
    if held and over["none"]["1+23"]["min"] <= FELT:
        return text + "; plain softmax needs no first token here", PART
    return text, HOLDS if held else NOT


def small_two_needed(r: Results) -> Finding:
    over = r["arms"]["two_tokens"]["summary"]["loss_over_base"]
    return small_table(r, "two_tokens"), HOLDS if over["1+23"]["min"] > FELT else NOT


TRAINING = [
    *claims("sink_tables"),
    *claims("sink_tables_160m"),
    Claim("The same where a head has nothing to do most of the time",
          "Table 3; the stream is that of Guo et al. 2024 (arXiv 2410.13835)",
          "backcopy", small_one_enough),
    Claim("Two sink tokens in training are then both needed", "appendix: no gain from a second",
          "backcopy", small_two_needed),
]  # fmt: skip
