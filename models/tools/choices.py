"""Which cache to take, as data: docs/which_cache.md lists all, `jaxkv advise` those for facts."""

from __future__ import annotations

from typing import NamedTuple

ENDLESS, PROMPT, SHORT = "endless text", "a prompt", "text within the trained context"
FACTS, GIST, BOTH = "single facts", "the gist", "single facts and the gist"
ANY, MESH = "CPU or accelerator", "a mesh that splits KV heads"
CPU = "CPU; no accelerator has run it"


class Choice(NamedTuple):
    """The answers to the three questions, the policy, and the reason for it."""

    text: str
    need: str
    device: str
    policy: str
    reason: str
    settings: str = ""  # in the policy string that `jaxkv advise` prints


CHOICES = (
    Choice(SHORT, BOTH, ANY, "full", "exact, if the memory suffices"),
    Choice(ENDLESS, GIST, ANY, "streaming",
           "memory and time per token are constant, and the loss does not grow with the text"),
    Choice(ENDLESS, FACTS, CPU, "retrieval",
           "with every=N, half of capacity as the window and budgets=calibrated it finds needles "
           "that left the window of streaming, in 8,192 tokens; capacity + N must fit the trained "
           "context, and `jaxkv calibrate` writes the budgets, for models of Llama's form",
           "capacity=896,window=448,every=128,budgets=calibrated,calibration=FILE"),
    Choice(PROMPT, GIST, ANY, "snapkv",
           "of up to 1,024 tokens: with half evicted it loses less than streaming"),
    Choice("a longer prompt", GIST, ANY, "streaming",
           "after 2,048 and 4,096 tokens its loss does not differ from that of snapkv, and it "
           "needs no memory for the prompt"),
    Choice(PROMPT, FACTS, CPU, "retrieval",
           "the budget goes to the heads that retrieve; with an eighth of 1,024 tokens cached it "
           "finds more needles with budgets=calibrated, in a text of the novel that the budgets "
           "were measured on", "capacity=1024"),
    Choice(PROMPT, FACTS, f"{MESH}; none has run it", "retrieval",
           "with budgets=equal, because a mesh splits no budget that KV heads share; with a "
           "quarter of 1,024 and 2,048 tokens it finds over two thirds of the needles",
           "capacity=1024,budgets=equal"),
    Choice("a prompt of a hundred thousand tokens", BOTH, "CPU with ample memory", "magicpig",
           "it caches every token and reads few; no accelerator has run its present lookup"),
)  # fmt: skip


def facts_lines(split: bool) -> list[str]:
    """What measured losses do not tell: the policies to take for single facts, a line each.

    split: whether a mesh splits KV heads.
    """
    lines = [
        f'For {FACTS} in {choice.text} take "{choice.policy}:{choice.settings}": {choice.reason}.'
        for choice in CHOICES
        if choice.need == FACTS and (MESH in choice.device) == split
    ]
    if split:
        lines.append(f"For {FACTS} in {ENDLESS} no cache was measured that a mesh can split.")
    return [f"Losses measure {GIST}, not {FACTS}.", *lines]
