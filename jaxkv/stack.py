"""Policies as text, one for each layer, and what they will cost before anything is allocated.

`name` or `name:field=value,...`; by layer `0=full;16=full;*=streaming:sinks=4,window=252`, where
`*` is every layer not named. Parsing and printing are inverse.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import typing
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import jax

from jaxkv import rows
from jaxkv.contract import Policy, Spec, State
from jaxkv.errors import UserError
from jaxkv.policies import POLICIES, Full, Window


def policy(text: str, layers: int | None = None) -> Policy | tuple[Policy, ...]:
    """The policy a string names; a tuple, one a layer, when the string names layers.

    layers: how many the model has; needed where `*` stands for the rest.
    Raises UserError for an unknown name, field or value.
    """
    if not isinstance(text, str):
        raise UserError(f"a policy is written as a string like streaming:sinks=4, got {text!r}")
    if "=" not in text.split(":")[0]:
        return _parse_one(text)
    named: dict[str, Policy] = {}
    for part in filter(None, text.split(";")):
        layer, equals, rest = part.partition("=")
        layer = layer.strip()
        if not equals or not (layer == "*" or layer.isdecimal()):
            raise UserError(
                f"policies by layer are written LAYER=POLICY;...;*=POLICY, got {part!r}"
            )
        layer = layer if layer == "*" else str(int(layer))
        if layer in named:
            raise UserError(f"layer {layer} is named twice in {text!r}; name it once")
        named[layer] = _parse_one(rest)
    numbers = [int(layer) for layer in named if layer != "*"]
    if layers is None:
        if "*" in named:
            raise UserError(f"{text!r} speaks of all other layers: give layers=, their number")
        layers = max(numbers) + 1
    missing = [i for i in range(layers) if str(i) not in named and "*" not in named]
    beyond = [i for i in numbers if i >= layers]
    if missing:
        raise UserError(f"layer {missing[0]} has no policy in {text!r}; add *=POLICY for the rest")
    if beyond:
        raise UserError(
            f"layer {beyond[0]} does not exist: the model has layers 0 to {layers - 1}; "
            "name those, or * for the rest"
        )
    return tuple(named.get(str(i), named.get("*")) for i in range(layers))


def spell(policies: Policy | Sequence[Policy]) -> str:
    """The string that `policy` reads back as the same policies; equal layers need no numbers."""
    if not isinstance(policies, (tuple, list)):
        return _spell_one(policies)
    policies = [_of_layer(one, 0, 1) for one in policies]
    if len(set(policies)) == 1:
        return _spell_one(policies[0])
    most, _ = Counter(policies).most_common(1)[0]
    named = [f"{i}={_spell_one(p)}" for i, p in enumerate(policies) if p != most]
    return ";".join([*named, f"*={_spell_one(most)}"])


def by_layer(
    chosen: str | Policy | Sequence[Policy | str], layers: int, windows: Sequence[int | None] = ()
) -> tuple[Policy, ...]:
    """One policy a layer.

    chosen: one for all, or one a layer, each as a string or a value.
    windows: the model's own sliding window of each layer, None where it has none. Such a layer
    keeps its window, which is all it was trained to see, unless the chosen policy holds less or
    the string names layers itself.
    """
    if isinstance(chosen, str):
        chosen = policy(chosen, layers)
    if isinstance(chosen, (tuple, list)):
        chosen = [_parse_one(one) if isinstance(one, str) else one for one in chosen]
        if len(chosen) != layers:
            raise UserError(f"one policy a layer: got {len(chosen)} for {layers} layers")
        return tuple(map(_of_layer, chosen, range(layers), [layers] * layers))
    own = [*windows, *[None] * (layers - len(windows))]
    too_far = [i for i, width in enumerate(own) if width is not None and reach(chosen) > width]
    if too_far and not isinstance(chosen, Full):
        warnings.warn(
            f"{len(too_far)} layer(s) keep the model's own window of {own[too_far[0]]} tokens, as "
            f"{spell(chosen)} reaches further; name layers, as in *={spell(chosen)}, to force it",
            stacklevel=2,
        )
    return tuple(
        Window(w) if i in too_far else _of_layer(chosen, i, layers) for i, w in enumerate(own)
    )


def _of_layer(chosen: Policy, layer: int, layers: int) -> Policy:
    return chosen.of_layer(layer, layers) if hasattr(chosen, "of_layer") else chosen


def reach(chosen: Policy, tokens: int | None = None) -> int | float:
    """The most tokens back that a policy lets a query look, in a text of so many tokens.

    A policy that says nothing of it may look back to the beginning. tokens None: no end.
    """
    length = math.inf if tokens is None else tokens
    return min(length, getattr(chosen, "reach", math.inf))


def state_bytes(policies: Iterable[Policy], spec: Spec, batch: int, tokens: int = 0) -> int:
    """Bytes of all layers of `batch` rows that hold `tokens` tokens, of a prompt before or after
    it is sealed, whichever are more, and in all memories; nothing is allocated.

    Raises UserError where a policy refuses that many tokens.
    """
    return sum(bytes_by_memory(policies, spec, batch, tokens))


def bytes_by_memory(
    policies: Iterable[Policy], spec: Spec, batch: int, tokens: int = 0
) -> tuple[int, int]:
    """Of `state_bytes` those on the device, and those in the memory of the host."""
    found = [
        [n * part for part in _bytes_of(p, spec, batch, tokens)]
        for p, n in Counter(policies).items()
    ]
    return tuple(map(sum, zip(*found, strict=True))) if found else (0, 0)


def on_host(chosen: Policy, state: State) -> int:
    """Bytes of those leaves that the policy keeps in the memory of the host."""
    paths = getattr(chosen, "on_host", ())
    return rows.nbytes([functools.reduce(getattr, path.split("."), state) for path in paths])


@functools.lru_cache(maxsize=256)
def _bytes_of(chosen: Policy, spec: Spec, batch: int, tokens: int) -> tuple[int, int]:
    def build():
        state = chosen.init(spec, batch, jax.random.key(0))
        return chosen.reserve(spec, state, tokens) if hasattr(chosen, "reserve") else state

    whole = jax.eval_shape(build)
    if not hasattr(chosen, "seal"):
        return rows.nbytes(whole), 0
    sealed = jax.eval_shape(lambda state: chosen.seal(spec, state), whole)
    host = on_host(chosen, sealed)
    return max(rows.nbytes(whole), rows.nbytes(sealed) - host), host


def formula_bytes(chosen: Policy, spec: Spec) -> int:
    """Bytes of one row of one layer as `init` makes it, by what the policy's `formula` says."""
    settings = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}
    sizes = {"K": spec.kv_heads, "G": spec.group, "H": spec.head_dim}
    itemsize = jax.numpy.dtype(spec.dtype).itemsize
    known = {**settings, **sizes, "itemsize": itemsize, "min": min}
    return eval(chosen.formula.split(", doubling")[0], {"__builtins__": {}}, known)


def describe() -> list[dict[str, object]]:
    """Every policy: its fields with types and defaults, what it keeps, its bytes, its source."""
    return [
        {
            "name": name,
            "summary": kind.summary,
            "fields": {
                f.name: {"type": _type_name(kind, f.name), "default": _written(f.default)}
                for f in _fields(kind)
            },
            "bytes_per_row_and_layer": kind.formula,
            "source": kind.source,
        }
        for name, kind in POLICIES.items()
    ]


def _fields(kind: type | Policy) -> list[dataclasses.Field]:
    """Those that a string may set: not what `of_layer` fills in."""
    return [field for field in dataclasses.fields(kind) if field.repr]


def _type_name(kind: type, field: str) -> str:
    hint = typing.get_type_hints(kind)[field]
    if hint is bool:
        return "true|false"
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return "|".join(map(str, choices)) or hint.__name__


def _parse_one(text: str) -> Policy:
    name, _, fields = (piece.strip() for piece in text.partition(":"))
    if name not in POLICIES:
        raise UserError(f"unknown policy {name!r}{_nearest(name, POLICIES)}")
    kind = POLICIES[name]
    hints = typing.get_type_hints(kind)
    known = [f.name for f in _fields(kind)]
    values: dict[str, object] = {}
    for part in filter(None, fields.split(",")):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if field not in known:
            raise UserError(f"{name} has no field {field!r}{_nearest(field, known)}")
        if not equals:
            raise UserError(f"fields are written field=value, got {part!r} in {text!r}")
        if field in values:
            raise UserError(f"{field} is given twice in {text!r}; give it once")
        values[field] = _read_value(name, field, hints[field], value)
    return kind(**values)


def _read_value(name: str, field: str, hint: object, value: str) -> object:
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(f"{name}: {field} must be {' or '.join(choices)}, got {value!r}")
        return value
    if hint is bool:
        if value not in ("true", "false"):
            raise UserError(f"{name}: {field} must be true or false, got {value!r}")
        return value == "true"
    try:
        return hint(value)
    except ValueError:
        what = {int: "a whole number", float: "a number"}[hint]
        raise UserError(f"{name}: {field} must be {what}, got {value!r}") from None


def _spell_one(chosen: Policy) -> str:
    names = {kind: name for name, kind in POLICIES.items()}
    if type(chosen) not in names:
        return repr(chosen)  # a policy of one's own has no name in the table
    fields = [f"{f.name}={_written(getattr(chosen, f.name))}" for f in _fields(chosen)]
    return f"{names[type(chosen)]}:{','.join(fields)}"


def _written(value: object) -> object:
    """As it stands in a string that names a policy."""
    return str(value).lower() if isinstance(value, bool) else value


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return (f"; did you mean {near[0]!r}?" if near else "") + f" (there are {', '.join(known)})"
