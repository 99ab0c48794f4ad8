"""Losses under kvpress's presses; runs in the Python of an environment with kvpress.

It imports nothing of jaxkv. Standard input is one JSON object: model, a Hugging Face folder;
tokens; prompt, how many of them are compressed; cases, a list of presses with their fields. Each
press compresses the prompt by kvpress's own context manager; the last case is full attention.

Standard output is one JSON list: per case the mean number of tokens per layer, then the losses.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any


def main() -> None:
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM

    asked = json.load(sys.stdin)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    presses = [getattr(kvpress, case["press"])(**case["fields"]) for case in asked["cases"]]
    tokens = torch.tensor([asked["tokens"]])
    rows = [losses_of(model, press, tokens, asked["prompt"]) for press in (*presses, None)]
    print(json.dumps([[cached, *losses] for cached, losses in rows]))


def losses_of(model: Any, press: Any, tokens: Any, prompt: int) -> tuple[float, list[float]]:
    """The tokens that a press keeps (None: all), and the losses after the first of the answer."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with nullcontext() if press is None else press(model):
        model.model(input_ids=tokens[:, :prompt], past_key_values=cache)
    cached = [layer.keys.shape[2] for layer in cache.layers]
    fed, targets = tokens[:, prompt:-1], tokens[0, prompt + 1 :]
    # Layers of unequal length share no mask, so they take one token at a time.
    size = fed.shape[1] if len(set(cached)) == 1 else 1
    losses: list[float] = []
    for begin in range(0, fed.shape[1], size):
        end = begin + size
        positions = torch.arange(prompt + begin, prompt + end)[None]
        out = model(input_ids=fed[:, begin:end], past_key_values=cache, position_ids=positions)
        cross_entropy = torch.nn.functional.cross_entropy
        losses += cross_entropy(out.logits[0], targets[begin:end], reduction="none").tolist()
    print(f"{press}: {sum(cached) / len(cached):g} tokens per layer", file=sys.stderr, flush=True)
    return sum(cached) / len(cached), losses


if __name__ == "__main__":
    main()
