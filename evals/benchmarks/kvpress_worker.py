"""Losses under kvpress's presses; runs in the Python of an environment with kvpress.

It imports nothing of jaxkv. Standard input is one JSON object: model, a Hugging Face folder;
tokens; prompt, how many of them are compressed; cases, a list of presses with their fields; check,
the number of one case. The prompt is read once, and each press compresses a copy of its cache, as
its hook does. The case `check` is also measured by kvpress's own context manager, token by token.

Standard output is one JSON object: losses, by case; cached, the mean number of tokens per layer;
full, the losses without compression; checked, the losses of the case `check`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    import torch

    asked = json.load(sys.stdin)
    torch.set_grad_enabled(False)
    print(json.dumps(measure(asked)))


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """All cases of one text."""
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    tokens, prompt = torch.tensor([asked["tokens"]]), asked["prompt"]
    presses = [getattr(kvpress, case["press"])(**case["fields"]) for case in asked["cases"]]
    read = read_prompt(model, tokens[:, :prompt])
    results: dict[str, Any] = {"losses": [], "cached": []}
    for press in presses:
        cache, cached = compressed(model, press, *read)
        results["losses"].append(answer(model, cache, tokens, prompt, len(set(cached)) == 1))
        results["cached"].append(sum(cached) / len(cached))
        print(
            f"{press}: {sum(cached) / len(cached):g} tokens per layer", file=sys.stderr, flush=True
        )
    full_cache, _ = compressed(model, None, *read)
    results["full"] = answer(model, full_cache, tokens, prompt, True)
    results["checked"] = by_context_manager(model, presses[asked["check"]], tokens, prompt)
    return results


def read_prompt(model: Any, tokens: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The cache of the whole prompt, and the arguments of every attention layer."""
    from transformers import DynamicCache

    layer_arguments: list[dict[str, Any]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, named: layer_arguments.append(named), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    cache = DynamicCache()
    model.model(input_ids=tokens, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return cache, layer_arguments


def compressed(
    model: Any, press: Any, cache: Any, layer_arguments: list[dict[str, Any]]
) -> tuple[Any, list[int]]:
    """A new cache with what a press keeps (None: everything), and the tokens of each layer."""
    from transformers import DynamicCache

    new, cached = DynamicCache(), []
    for number, layer in enumerate(model.model.layers):
        attention, named = layer.self_attn, layer_arguments[number]
        attention.rotary_emb = model.model.rotary_emb
        keys, values = cache.layers[number].keys, cache.layers[number].values
        if press is not None:
            hidden = named["hidden_states"]
            keys, values = press.compress(attention, hidden, keys, values, None, named)
        new.update(keys.clone(), values.clone(), number)
        cached.append(keys.shape[2])
    return new, cached


def answer(model: Any, cache: Any, tokens: Any, prompt: int, at_once: bool) -> list[float]:
    """The losses of the tokens after the first of the answer; layers of unequal length share no
    mask, so they take one token at a time."""
    import torch

    losses = []
    fed, targets = tokens[:, prompt:-1], tokens[0, prompt + 1 :]
    size = fed.shape[1] if at_once else 1
    for begin in range(0, fed.shape[1], size):
        part = fed[:, begin : begin + size]
        positions = torch.arange(prompt + begin, prompt + begin + size)[None]
        out = model(input_ids=part, past_key_values=cache, position_ids=positions)
        part_targets = targets[begin : begin + size]
        losses += torch.nn.functional.cross_entropy(
            out.logits[0], part_targets, reduction="none"
        ).tolist()
    return losses


def by_context_manager(model: Any, press: Any, tokens: Any, prompt: int) -> list[float]:
    """The losses of a press applied as kvpress documents it, token by token."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with press(model):
        model.model(input_ids=tokens[:, :prompt], past_key_values=cache)
    return answer(model, cache, tokens, prompt, at_once=False)


if __name__ == "__main__":
    main()
