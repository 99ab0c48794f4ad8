"""The caches of a model's layers under a policy: which layers are alike, and their bytes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from jaxkv.contract import Policy
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.config import of_layer
from jaxkv.policy_spec import format_policy, state_bytes
from jaxkv.rotary import Alibi, Encoding, NoPosition
from jaxkv.state.memory import show

SPANS = 4  # runs of layers that are shown


def describe(llm: Llm, policy: str, tokens: int) -> list[dict[str, Any]]:
    """Groups of equal layers: their numbers, what they attend by, their policy and its bytes.

    tokens: of the sequence. bytes: of one sequence in all layers of the group.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    policies = quiet_policies(llm, policy)
    for number, (of_this_layer, window) in enumerate(
        zip(policies, llm.config.windows, strict=True)
    ):
        config = of_layer(llm.config, number)
        chosen = config.experts and config.experts_per_token
        key = of_this_layer, window, (chosen, config.experts), llm.specs[number]
        groups.setdefault(key, []).append(number)
    return [
        {
            "layers": numbers,
            "window": window,
            "positions": positions(spec.encoding),
            "experts": experts,
            "experts_per_token": chosen,
            "policy": format_policy(of_these_layers),
            "bytes": len(numbers) * state_bytes((of_these_layers,), spec, 1, tokens),
        }
        for (of_these_layers, window, (chosen, experts), spec), numbers in groups.items()
    ]


def quiet_policies(llm: Llm, policy: str) -> tuple[Policy, ...]:
    """One policy per layer, without the warning that some layers keep the model's own window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return llm.policies(policy)


def positions(encoding: Encoding) -> str:
    """What a layer knows of positions, in one word."""
    if isinstance(encoding, NoPosition):
        return "none"
    return "ALiBi" if isinstance(encoding, Alibi) else "rotary"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The groups as a text table."""
    cells = [["layers", "own window", "positions", "experts", "policy", "memory"]]
    for row in rows:
        window = "-" if row["window"] is None else f"{row['window']:,}"
        experts = f"{row['experts_per_token']} of {row['experts']}" if row["experts"] else "-"
        cells.append([spans(row["layers"]), window, row["positions"], experts, row["policy"],
                      show(row["bytes"])])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs joined: 0-4,6-10; a long list ends with how many there are."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    shown = texts[:SPANS]
    return ",".join(shown) + (f",... ({len(numbers)})" if len(texts) > SPANS else "")
