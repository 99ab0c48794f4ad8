"""README's tables of policies: what there is, what each predicted, and what each costs."""

from __future__ import annotations

import re
from typing import Any

from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.memory import show
from jaxkv.policies import POLICIES

# When to take a policy, and when not.
USE = {
    "full": ("texts shorter than the trained context; what all others are held against",
             "longer ones: it falls apart, and its memory grows"),
    "window": ("models trained with a sliding window",
               "models that have grown sinks: they fail without their first tokens"),
    "streaming": ("endless text, from any model: the first to try",
                  "questions about what has left the window"),
    "h2o": ("texts within the trained context, in less memory",
            "endless text: tokens keep their places in it, which outgrow the trained context"),
    "reservoir": ("endless text of which something said long ago may be asked",
                  "the next token alone: it costs a little loss, and time"),
    "stratified": ("the same, spread evenly over the text", "as reservoir"),
    "balance-stream": ("the same, of tokens that stand for their like", "as reservoir"),
    "balance": ("a long prompt, thinned once, with a short answer",
                "endless text; prompts of which a few tokens matter"),
    "uniform": ("what `balance` is held against, and often as good", "as balance"),
    "snapkv": ("a prompt that ends in its question",
               "endless text; several questions to one prompt: it was thinned for the first"),
    "pyramidkv": ("the same, with most of it in the first layers", "as snapkv"),
    "magicpig": ("prompts of tens of thousands of tokens, to read fewer of them for a token",
                 "memory: it takes more than full; prompts that are short"),
    "topk": ("a yardstick: the best keys there are", "speed or memory: it reads every key"),
    "topp": ("the same, as many as hold a mass", "as topk"),
    "oracle": ("a yardstick: the best that sampling can do", "as topk"),
    "quest": ("a yardstick of pages of keys", "as topk"),
    "vattention": ("a yardstick with a promised error", "as topk"),
}  # fmt: skip


def policies() -> str:
    """What there is."""
    lines = table("policy", "keeps", "bytes for a row and layer", "take it for", "not for")
    for name, policy in POLICIES.items():
        when, not_when = USE[name]
        keeps = f"{policy.summary} ({linked(policy.source)})"
        lines.append(f"| `{name}` | {keeps} | {short(policy.formula)} | {when} | {not_when} |")
    return "\n".join(lines) + "\n"


def table(*heads: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]


def linked(source: str) -> str:
    """A source with its paper's address."""
    return re.sub(r"(.*?),? arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\2)", source)


def short(formula: str) -> str:
    """A policy's formula for its bytes, with t for a token of all kv heads and u for one of one."""
    formula = formula.replace("(2 * K * H * itemsize + 4)", "t")
    return formula.replace("(2 * H * itemsize + 4)", "u")


def predicted() -> str:
    """What was lost to the next token."""
    lines = table(
        "policy", "tokens held or read", "loss behind a prompt, over full's",
        "loss without end, over streaming's",
    )  # fmt: skip
    for name, row in rows().items():
        first, last = (row["tokens"][at]["mean"] for at in ("first", "last"))
        grows = f"{first:.0f}" if round(first) == round(last) else f"{first:.0f} to {last:.0f}"
        after_prompt = "0" if name == "full" else over(row["behind_a_prompt"])
        endless = "0" if name == "streaming" else over(row.get("without_end"))
        lines.append(f"| `{name}` | {grows} | {after_prompt} | {endless} |")
    return "\n".join(lines) + "\n"


def over(found: dict[str, Any] | None) -> str:
    """A difference with two standard errors."""
    if found is None:
        return "(needs a prompt)"
    return f"{found['mean']:+.3f} ± {found['two_errors']['stretches']:.3f}"


def cost() -> str:
    """What a token costs after a long prompt."""
    lines = table(
        "policy", "tokens held or read", "memory while the prompt is read", "while it is answered",
        "time of a token, over full's",
    )  # fmt: skip
    for name, row in rows().items():
        of = row["long"]
        tokens = ranged(of["tokens"], "mean", ",.0f")
        reading, then = show(of["reading_bytes"]), show(of["state_bytes"])
        time = "1" if name == "full" else ranged(of["times_as_long"], "median", ".2f")
        lines.append(f"| `{name}` | {tokens} | {reading} | {then} | {time} |")
    return "\n".join(lines) + "\n"


def ranged(found: dict[str, float], middle: str, form: str) -> str:
    """A number with its least and most, where they are not the same."""
    at, least, most = (format(found[name], form) for name in (middle, "min", "max"))
    return at if least == most else f"{at} ({least} to {most})"


def rows() -> dict[str, Any]:
    """What was measured of each policy."""
    return read("side_by_side", RESULTS)["results"]["rows"]


TABLES = {"policies": policies, "predicted": predicted, "cost": cost}
