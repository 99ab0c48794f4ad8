"""Head shares: which part of a model's KV budget each KV head needs, read from a small JSON file.

`jaxkv calibrate` writes such a file, from one plain text per model. Which heads retrieve is a
property of the model and hardly of the text. So budgets of fixed sizes are enough, and compiled
programs have fixed shapes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.contract import Spec
from jaxkv.errors import UserError, is_whole
from jaxkv.rotary import Rotary
from jaxkv.typing import Float, Integer

FORMAT = "jaxkv head shares 1"
FOLDER = Path(__file__).with_name("calibrated")  # files in the package, found by name
SAFEGUARD = 5  # unequal budgets leave a fifth of an equal share to every KV head (AdaKV)
MAX_GROUPS = 8  # of layers with one total; each compiles programs of its own
MAX_BYTES = 10_000_000  # of a file; a model of 100 layers has a few kilobytes


class HeadShares(NamedTuple):
    """The head shares of a model, with what they were measured on.

    name, fingerprint: the model's. text: the sha256 of the text, and the number of its first tokens
    that were read. shares: a number from 0 to 1 for each layer and KV head, which `jaxkv calibrate`
    makes add up to 1.
    """

    name: str
    fingerprint: str
    kv_heads: int
    head_dim: int
    encoding: Rotary
    text: dict[str, Any]
    shares: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LayerBudgets:
    """The fixed numbers of tokens that the KV heads of one layer keep.

    by_head: the number of each KV head; none in the policy of a compiled program, which has them as
    an array. total: rows for all KV heads. largest, smallest: bounds of the number of any KV head,
    in all layers that share the program.
    """

    by_head: tuple[int, ...]
    total: int
    largest: int
    smallest: int

    @classmethod
    def of(cls, by_head: Sequence[int]) -> LayerBudgets:
        """Those of a layer that shares its programs with no other."""
        return cls(tuple(by_head), sum(by_head), max(by_head), min(by_head))


def write(head_shares: HeadShares) -> str:
    """The JSON of head shares."""
    encoding = head_shares.encoding
    fields = {
        "format": FORMAT,
        "model": {"name": head_shares.name, "fingerprint": head_shares.fingerprint},
        "layers": len(head_shares.shares),
        "kv_heads": head_shares.kv_heads,
        "head_dim": head_shares.head_dim,
        "rotary": {"frequencies": encoding.frequencies, "amplitude": encoding.amplitude},
        "text": head_shares.text,
        "shares": head_shares.shares,
    }
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(name: str) -> HeadShares:
    """Head shares by the name of a file in the package, or by the path of a file.

    Raises UserError for a file that cannot be read or is damaged.
    """
    names = shipped()
    path = FOLDER / f"{name}.json" if name in names else Path(name)
    remedy = f"name a file that `jaxkv calibrate` wrote, or one of {', '.join(names)}"
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the head shares {name!r}: {reason}; {remedy}") from None
    try:
        return _parsed(raw)
    except UserError as error:
        raise UserError(f"{name}: {error}; {remedy}") from None
    # Of JSON, of UTF-8, of a field.
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise UserError(f"{name} has no head shares of the format {FORMAT!r}; {remedy}") from None


def shipped() -> list[str]:
    """The names of the files in the package."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


@lru_cache(maxsize=8)  # each layer of a model reads its file
def _parsed(raw: bytes) -> HeadShares:
    """The head shares of a file's bytes; raises one of the errors that `read` catches."""
    fields = json.loads(raw)
    for number in (number for layer in fields["shares"] for number in layer):
        if type(number) not in (int, float) or not 0 <= number <= 1:
            raise UserError(f"shares must be numbers from 0 to 1, got {number!r:.60}")
    shares = tuple(tuple(map(float, layer)) for layer in fields["shares"])
    rotary, model, text = fields["rotary"], fields["model"], fields["text"]
    layers, kv_heads, head_dim = (fields[name] for name in ("layers", "kv_heads", "head_dim"))
    encoding = Rotary(tuple(rotary["frequencies"]), float(rotary["amplitude"]))
    if not (
        fields["format"] == FORMAT
        and all(map(is_whole, (layers, kv_heads, head_dim, *encoding.frequencies)))
        and len(shares) == layers > 0
        and {len(layer) for layer in shares} == {kv_heads}
        and sum(map(sum, shares)) > 0
        and isinstance(text, dict)
    ):
        raise ValueError
    return HeadShares(
        str(model["name"]), str(model["fingerprint"]), kv_heads, head_dim, encoding, text, shares
    )


def check_model(name: str, spec: Spec, layers: int, fingerprint: str) -> None:
    """Raise UserError unless the head shares of this name belong to a model.

    fingerprint: `ModelSource.fingerprint` of the model.
    """
    head_shares = read(name)
    facts = {
        "layers": (len(head_shares.shares), layers),
        "KV heads": (head_shares.kv_heads, spec.kv_heads),
        "head dims": (head_shares.head_dim, spec.head_dim),
        "rotary settings": (head_shares.encoding, spec.encoding),
        "weights": (head_shares.fingerprint, fingerprint),
    }
    for fact, (of_file, of_model) in facts.items():
        if of_file != of_model:
            values = "" if fact == "rotary settings" else f", {of_file} and not {of_model}"
            raise UserError(
                f"calibration={name} belongs to another model, {head_shares.name}: its {fact} "
                f"differ{values}; run `jaxkv calibrate` on this model"
            )


def budgets(name: str, num_layers: int, budget: int) -> tuple[LayerBudgets, ...]:
    """The budgets of all layers.

    All heads of all layers share `budget` tokens per head, in proportion to their shares above a
    floor of budget / SAFEGUARD. Layers are grouped by total, in MAX_GROUPS equal steps of its
    logarithm from the smallest to the largest. Each layer gets the mean of its group, so that a
    group shares programs. Rounding leaves less than one token of each layer unused.
    Raises UserError for head shares of another number of layers.
    """
    shares = read(name).shares
    if len(shares) != num_layers:
        raise UserError(
            f"calibration={name} has {len(shares)} layers, but the model has {num_layers}; run "
            "`jaxkv calibrate` on this model"
        )
    return _budgets(shares, budget)


@lru_cache(maxsize=64)  # each layer asks for its part
def _budgets(head_shares: tuple[tuple[float, ...], ...], budget: int) -> tuple[LayerBudgets, ...]:
    shares, floor = np.array(head_shares, np.float64), max(1, budget // SAFEGUARD)
    rest = (budget - floor) * shares.size  # tokens above the floor
    above = rest * shares.sum(axis=1) / shares.sum()
    logs = np.log(floor * shares.shape[1] + above)
    steps = MAX_GROUPS * (logs - logs.min()) / max(np.ptp(logs), 1e-9)
    groups = np.minimum(steps.astype(int), MAX_GROUPS - 1)
    tokens = np.zeros(shares.shape, np.int64)
    for group in set(groups):
        mean = int(above[groups == group].mean() + 1e-6)
        for layer in np.flatnonzero(groups == group):
            tokens[layer] = floor + apportion(mean, shares[layer])
    by_group = {group: tokens[groups == group] for group in groups}
    return tuple(
        LayerBudgets(
            tuple(map(int, heads)),
            int(heads.sum()),
            int(by_group[group].max()),
            int(by_group[group].min()),
        )
        for heads, group in zip(tokens, groups, strict=True)
    )


def apportion(tokens: int, shares: Float[np.ndarray, " K"]) -> Integer[np.ndarray, " K"]:
    """Whole numbers in proportion to shares, which add up to `tokens`: largest remainder first."""
    shares = shares if shares.sum() > 0 else np.ones_like(shares)
    exact = tokens * shares / shares.sum()
    numbers = np.floor(exact).astype(np.int64)
    numbers[np.argsort(numbers - exact, kind="stable")[: tokens - numbers.sum()]] += 1
    return numbers
