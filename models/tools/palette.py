"""One colour per policy or training variant, in every figure; full attention is grey."""

from __future__ import annotations

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = {
    "full": "#8c8c8c",
    "window": "#d55e00",
    "streaming": "#0072b2",
    "recompute": "#009e73",
    "reservoir": "#e69f00",
    "balance-stream": "#56b4e9",
    "stratified": "#cc79a7",
    "h2o": "#000000",
    # Prompt compression; of those above, only full and streaming share a picture with these.
    "balance": "#56b4e9",
    "uniform": "#e69f00",
    "snapkv": "#009e73",
    "pyramidkv": "#000000",
    "expected-attention": "#d55e00",
    "keydiff": "#cc79a7",
    "retrieval": "#f0e442",
    # Compression of answers; of those above, only full, streaming and h2o share a picture.
    "tova": "#d55e00",
    "rkv": "#e69f00",
    "vase": "#009e73",
    "triattention": "#cc79a7",
    # Sparse attention; of those above, only full and uniform share a picture with these.
    "magicpig": "#d55e00",
    "topk": "#0072b2",
    "topp": "#cc79a7",
    "oracle": "#000000",
    "quest": "#009e73",
    "loki": "#f0e442",
    "vattention": "#56b4e9",
}
VARIANTS = {  # of training; plain softmax is the baseline
    "none": "#000000",
    "zero": "#e69f00",
    "logit": "#cc79a7",
    "token": "#0072b2",
    "two_tokens": "#56b4e9",
}
ROLLOUTS = {  # variants of reinforcement learning, in evals.training.rollouts
    "full": COLOURS["full"],
    "mismatch": "#d55e00",
    "weights": "#e69f00",
    "bounded": COLOURS["streaming"],
}
OTHERS = ("#cc79a7", "#e69f00", "#56b4e9", "#000000")  # for policies without an own colour
LINES = ("solid", "dashed", "dotted", "dashdot")  # for one policy with several settings


def styles(policies: list[str]) -> list[dict[str, str]]:
    """Colour and line of each policy string, for matplotlib."""
    names = [policy.split(":")[0].split(",")[0] for policy in policies]
    names = ["" if "=" in name else name for name in names]
    unknown = [name for name in dict.fromkeys(names) if name not in COLOURS]
    colours = COLOURS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(unknown)}
    return [
        {
            "color": colours[name],
            "linestyle": LINES[(names[:i].count(name) + (name in unknown)) % len(LINES)],
        }
        for i, name in enumerate(names)
    ]
