"""Losses and kept tokens under kvpress's presses; runs in an environment with kvpress.

It imports nothing of jaxkv. Standard input is one JSON object: model, a Hugging Face folder;
tokens; prompt, how many of them are compressed; cases, a list of presses with their fields, and
with the press around each, if there is one. Each press compresses the prompt by kvpress's own
context manager; the last case is full attention.

Standard output is one JSON list with a list per case: the mean number of tokens per layer; the
losses; whether each scored token is the likeliest; and the kept tokens by layer, KV head and
position, as packed bits in hexadecimal.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    request = json.load(sys.stdin)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    tokens = torch.tensor([request["tokens"]])
    keys: list[Any] = []  # of the whole prompt, by layer
    rows = [
        row_of(model, press, tokens, request["prompt"], keys)
        for press in (None, *map(press_of, request["cases"]))
    ]
    print(json.dumps([*rows[1:], rows[0]]))


def press_of(case: dict[str, Any]) -> Any:
    import kvpress

    press = getattr(kvpress, case["press"])(**case["fields"])
    return getattr(kvpress, case["around"])(press) if case["around"] else press


def row_of(model: Any, press: Any, tokens: Any, prompt: int, keys: list[Any]) -> list[Any]:
    """One case. press: None keeps every token, and then `keys` gets the keys of the prompt."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with nullcontext() if press is None else press(model):
        model.model(input_ids=tokens[:, :prompt], past_key_values=cache)
    keys += [layer.keys.clone() for layer in cache.layers] if press is None else []
    modules = [layer.self_attn for layer in model.model.layers]
    kept = [kept_of(*layer) for layer in zip(modules, cache.layers, keys, strict=True)]
    cached = torch.stack(kept).sum().item() / len(kept) / kept[0].shape[0]
    sizes = {layer.keys.shape[2] for layer in cache.layers}
    fed, targets = tokens[:, prompt:-1], tokens[0, prompt + 1 :]
    # Layers of unequal length share no mask, so they take one token at a time.
    size = fed.shape[1] if len(sizes) == 1 else 1
    losses: list[float] = []
    hits: list[bool] = []
    for begin in range(0, fed.shape[1], size):
        end = begin + size
        positions = torch.arange(prompt + begin, prompt + end)[None]
        out = model(input_ids=fed[:, begin:end], past_key_values=cache, position_ids=positions)
        logits, expected = out.logits[0], targets[begin:end]
        losses += torch.nn.functional.cross_entropy(logits, expected, reduction="none").tolist()
        hits += (logits.argmax(-1) == expected).tolist()
    print(f"{press}: {cached:g} tokens per layer", file=sys.stderr, flush=True)
    bits = np.packbits(torch.stack(kept).numpy(), axis=-1)
    return [cached, losses, hits, bits.tobytes().hex()]


def kept_of(module: Any, layer: Any, keys: Any) -> Any:
    """Whether each token of a prompt is kept, by KV head [K,P].

    A press removes keys [1,K,P,H] from the cache, so each cached key is one of them; with budgets
    per head it masks them in the module instead.
    """
    import torch

    kept = torch.zeros(keys.shape[1:3], dtype=torch.bool)
    masked = getattr(module, "masked_key_indices", None)
    if masked is not None:
        kept[:] = True
        kept[masked[1], masked[2]] = False
        return kept
    for head, (of_head, cached) in enumerate(zip(keys[0], layer.keys[0], strict=True)):
        place = {key.tobytes(): at for at, key in enumerate(of_head.numpy())}
        kept[head, [place[key.tobytes()] for key in cached.numpy()]] = True
    return kept


if __name__ == "__main__":
    main()
