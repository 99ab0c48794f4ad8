"""Which cache to take, as data: docs/which_cache.md lists all, `jaxkv advise` those for facts."""

from __future__ import annotations

from typing import NamedTuple

ENDLESS, PROMPT, SHORT = "endless text", "a prompt", "text within the trained context"
FACTS, GIST, BOTH = "single facts", "the gist", "single facts and the gist"
ANY, MESH = "CPU or accelerator", "a mesh that splits KV heads"


class Choice(NamedTuple):
    """The answers to the three questions, the policy, and the reason for it."""

    text: str
    need: str
    device: str
    policy: str
    reason: str


CHOICES = (
    Choice(SHORT, BOTH, ANY, "full", "exact, if the memory suffices"),
    Choice(ENDLESS, GIST, ANY, "streaming",
           "memory and time per token are constant, and the loss does not grow with the text"),
    Choice(ENDLESS, FACTS, ANY, "retrieval",
           "with every=128, budgets of `jaxkv calibrate`, half of its capacity as window, and an "
           "eighth of the text that questions go back to, it finds needles that left the window of "
           "streaming; with every=32 and the bytes of 256 tokens its loss is no higher"),
    Choice(PROMPT, GIST, ANY, "snapkv",
           "after 2,048 tokens with three quarters or more evicted, it loses less than keydiff; "
           "expected-attention differs from it only on the default model, and loses more there"),
    Choice(PROMPT, FACTS, ANY, "retrieval", "the budget goes to the heads that retrieve"),
    Choice(PROMPT, FACTS, MESH, "keydiff", "it has equal budgets per KV head, and needs no query"),
    Choice("a prompt of a hundred thousand tokens", BOTH, "CPU with ample memory", "magicpig",
           "it caches every token and reads few of them; on accelerators its lookup is slow"),
)  # fmt: skip


def facts_sentence() -> str:
    """What measured losses do not tell: the policy to take for single facts."""
    takes = [
        f"{choice.policy} for {choice.text} ({choice.reason})"
        for choice in CHOICES
        if choice.need == FACTS and choice.device != MESH
    ]
    return f"Losses measure {GIST}. For {FACTS}, take {', and '.join(takes)}."
