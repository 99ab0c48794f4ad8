"""Tables of docs/: the policies, what each predicted at equal budgets, and what each costs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import partial
from typing import Any

from jaxkv.contract import Policy
from jaxkv.evals.lib import gallery
from jaxkv.evals.lib.claim import ranged
from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.evals.peers import rates_table
from jaxkv.evals.speed import workarounds_table
from jaxkv.evals.tasks import report
from jaxkv.policies import POLICIES
from jaxkv.state.memory import show

# What to use a policy for, and what not.
USE = {
    "full": ("texts within the trained context; the reference for every other policy",
             "longer texts: its loss rises beyond the trained context, and its memory grows"),
    "window": ("models trained with a sliding window",
               "models with attention sinks: they fail without their first tokens"),
    "streaming": ("endless text, with any model; try it first",
                  "questions about evicted text"),
    "h2o": ("texts within the trained context, in less memory",
            "endless text: positions are absolute and outgrow the trained context"),
    "reservoir": ("endless text where distant tokens may matter",
                  "texts where only the newest tokens matter: loss and time per token are higher"),
    "stratified": ("endless text, with a sample spread evenly over it",
                   "texts where only the newest tokens matter, as reservoir"),
    "balance-stream": ("endless text, with a sample that preserves attention",
                       "texts where only the newest tokens matter, as reservoir"),
    "balance": ("a long prompt, compressed once, with a short answer",
                "endless text; prompts of which only a few tokens matter"),
    "uniform": ("a baseline of `balance`, and often as good",
                "endless text; prompts of which only a few tokens matter"),
    "snapkv": ("a prompt that ends in its question",
               "endless text; several questions about one prompt, which is compressed for the "
               "first"),
    "pyramidkv": ("a prompt that ends in its question, with most of the budget in the first layers",
                  "endless text; several questions about one prompt, as snapkv"),
    "expected-attention": ("a long prompt that is continued, at the lowest loss",
                           "endless text; models whose logits have a softcap"),
    "keydiff": ("a long prompt with single facts that are asked for later",
                "endless text; removing most of a prompt, where its loss is the highest"),
    "magicpig": ("prompts of tens of thousands of tokens, to read fewer keys per token",
                 "short prompts; saving memory: it needs more than full"),
    "topk": ("an oracle baseline: attention to the largest logits",
             "speed or memory: it reads every key"),
    "topp": ("an oracle baseline: attention to the keys that reach a mass",
             "speed or memory: it reads every key"),
    "oracle": ("an oracle baseline: attention by exact sampling",
               "speed or memory: it reads every key"),
    "quest": ("an oracle baseline: attention to selected pages of keys",
              "speed or memory: it reads every key"),
    "vattention": ("an oracle baseline: attention with an error bound",
                   "speed or memory: it reads every key"),
}  # fmt: skip


def policies() -> str:
    """One section per policy, from its docstring and fields."""
    sections = []
    for name, policy in POLICIES.items():
        when, not_when = USE[name]
        about = inspect.getdoc(policy)
        fields = ", ".join(
            f"`{f.name}={str(f.default).lower() if f.default in (True, False) else f.default}`"
            for f in dataclasses.fields(policy) if f.repr
        )  # fmt: skip
        sections.append(
            f"### `{name}`\n\n{about}\n\n"
            f"- **Take it for** {when}.\n- **Not for** {not_when}.\n- **Fields** {fields}.\n"
            f"- **Bytes** of one sequence in one layer: {size(policy)}.\n"
            f"- **Source** {linked(policy.source)}.\n"
        )
    return "\n" + "\n".join(sections) + "\n"


def size(policy: type[Policy]) -> str:
    """A policy's formula for its bytes; t: bytes of a token in all KV heads, u: in one."""
    formula = " ".join(inspect.getdoc(policy.bytes_per_sequence).split())
    formula = formula.replace("(2 * K * H * itemsize + 4)", "t")
    return formula.replace("(2 * H * itemsize + 4)", "u").replace("*", "\\*")


def table(*heads: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]


def linked(source: str) -> str:
    """A source with its paper's address."""
    return re.sub(r"(.*?),? arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\2)", source)


def predicted() -> str:
    """The loss of the next token."""
    lines = table(
        "policy", "KV budget (tokens)", "after a prompt: loss minus full's",
        "endless text: loss minus streaming's",
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
        return "needs a prompt"
    return f"{found['mean']:+.3f} ± {found['two_errors']['stretches']:.3f}"


def cost() -> str:
    """What a token costs after a long prompt."""
    lines = table(
        "policy", "KV budget (tokens)", "memory during prefill", "memory during decode",
        "time per token over full's",
    )  # fmt: skip
    for name, row in rows().items():
        of = row["long"]
        tokens = ranged(of["tokens"], "mean", ",.0f")
        reading, then = show(of["reading_bytes"]), show(of["state_bytes"])
        time = "1" if name == "full" else ranged(of["times_as_long"], "median", ".2f")
        lines.append(f"| `{name}` | {tokens} | {reading} | {then} | {time} |")
    return "\n".join(lines) + "\n"


def rows() -> dict[str, Any]:
    """The measurements of each policy."""
    return read("side_by_side", RESULTS)["results"]["rows"]


TABLES = {"policies": policies, "predicted": predicted, "cost": cost}
TABLES |= {name: partial(report.table, name) for name in ("tasks", "tasks_query_aware")}
TABLES |= {"llama_cpp": rates_table.table, "workarounds": workarounds_table.table}
TABLES |= {"pictures": gallery.page}
