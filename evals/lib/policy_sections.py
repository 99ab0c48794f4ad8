"""The sections of docs/policies.md, one per policy."""

from __future__ import annotations

import dataclasses
import inspect
import re

from jaxkv.policies import POLICIES

# What a policy is for, and what not.
USES = {
    "full": (
        "texts within the trained context; the reference for every other policy",
        "longer texts: its loss rises beyond the trained context, and its memory grows",
    ),
    "window": (
        "models trained with a sliding window",
        "models with attention sinks, which need their first tokens",
    ),
    "streaming": ("endless text, with any model; try it first", "questions about evicted text"),
    "h2o": (
        "texts within the trained context, in less memory",
        "endless text: positions are absolute and outgrow the trained context",
    ),
    "reservoir": (
        "endless text where distant tokens may matter; try it on yours first",
        "single distant facts; texts where only the newest tokens matter",
    ),
    "stratified": (
        "endless text, with a sample spread evenly over it",
        "texts where only the newest tokens matter, as reservoir",
    ),
    "balance-stream": (
        "endless text, with a sample that preserves attention",
        "texts where only the newest tokens matter, as reservoir",
    ),
    "balance": (
        "a long prompt, compressed once, with a short answer",
        "endless text; prompts of which only a few tokens matter",
    ),
    "uniform": (
        "a baseline of `balance`", "endless text; prompts of which only a few tokens matter",
    ),
    "snapkv": (
        "a long prompt that is continued",
        "endless text without `every`; single facts of the prompt; several questions about one "
        "prompt, which is compressed for the first",
    ),
    "pyramidkv": (
        "a long prompt that is continued, with most of the budget in the first layers",
        "endless text without `every`; single facts of the prompt and several questions, as snapkv",
    ),
    "expected-attention": (
        "a long prompt that is continued, however it ends",
        "endless text without `every`; single facts of the prompt; models whose logits have a "
        "softcap",
    ),
    "keydiff": (
        "a baseline of `retrieval`, with the rotated keys of the paper",
        "endless text without `every`; removing most of a prompt; long prompts, in which it loses "
        "most single facts",
    ),
    "retrieval": (
        "a prompt that is asked about afterwards: single facts anywhere in it; with `every`, "
        "endless text that is asked about",
        "a mesh that splits KV heads, but with `budgets=equal`",
    ),
    "tova": (
        "a baseline of caches that evict by the newest query's attention",
        "single distant facts; long texts: each token compresses the cache; a mesh that splits KV "
        "heads",
    ),
    "rkv": (
        "long answers that repeat themselves, as chains of thought do",
        "single distant facts",
    ),
    "vase": (
        "long answers by sampling, as chains of thought",
        "single distant facts; answers that must not depend on a seed",
    ),
    "triattention": (
        "long answers, by a score that needs no attention",
        "single distant facts; models without rotary positions, in which distance tells little",
    ),
    "magicpig": (
        "prompts of a hundred thousand tokens on a CPU, to read fewer keys per token",
        "short prompts; GPUs and TPUs, which never ran its present lookup; saving memory",
    ),
}  # fmt: skip
READS_ALL = "speed or memory: it reads every key"
USES |= {
    "topk": ("an oracle baseline: attention to the largest logits", READS_ALL),
    "topp": ("an oracle baseline: attention to the keys that reach a mass", READS_ALL),
    "oracle": ("an oracle baseline: attention by exact sampling", READS_ALL),
    "quest": ("an oracle baseline: attention to selected pages of keys", READS_ALL),
    "loki": ("an oracle baseline: attention to keys ranked in few dimensions", READS_ALL),
    "vattention": ("an oracle baseline: attention with an error bound", READS_ALL),
}


def policies() -> str:
    """One section per policy, from its docstring and fields."""
    sections = []
    for name, policy in POLICIES.items():
        use, avoid = USES[name]
        words = (True, False, None)
        fields = ", ".join(
            f"`{f.name}={str(f.default).lower() if f.default in words else f.default}`"
            for f in dataclasses.fields(policy) if f.repr
        )  # fmt: skip
        sections.append(
            f"### `{name}`\n\n{inspect.getdoc(policy)}\n\n"
            f"- **Take it for** {use}.\n- **Not for** {avoid}.\n"
            f"- **Fields** {fields}.\n"
            f"- **Source** {linked(policy.source)}.\n"
        )
    return "\n" + "\n".join(sections) + "\n"


def linked(source: str) -> str:
    """A source with its paper's address."""
    return re.sub(r"(.*?),? arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\2)", source)
