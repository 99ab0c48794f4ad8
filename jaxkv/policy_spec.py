"""Policy specifications: policies as text, one policy per layer, and bytes before allocation.

`name` or `name:field=value,...`; by layer `0=full;16=full;*=streaming:sinks=4,window=252`, where
`*` is every layer not named. `format_policy` writes a string that `parse_policy` reads back; a
policy that is not in POLICIES is written as its repr.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import jax

from jaxkv.contract import Policy, Spec, State
from jaxkv.errors import UserError, check_choice, check_int, suggestion, warn
from jaxkv.policies import POLICIES, Full, Window
from jaxkv.rotary import rotary
from jaxkv.state.batch import nbytes

# A layer of SmolLM2-135M, and the tokens for which `describe` gives the bytes of one.
EXAMPLE = Spec(kv_heads=3, head_dim=64, scale=64**-0.5, encoding=rotary(64, 1e4), group=3)
EXAMPLE_TOKENS = (1024, 16384)


def parse_policy(text: str, layers: int | None = None) -> Policy | tuple[Policy, ...]:
    """The policy that a string names; a tuple with one per layer where the string names layers.

    layers: the number of layers of the model; needed where `*` names the rest.
    Raises UserError for an unknown name, field or value.
    """
    if not isinstance(text, str):
        raise UserError(f"a policy is written as a string like streaming:sinks=4, got {text!r}")
    name, equals, _ = text.split(":")[0].partition("=")
    names_layers = ";" in text
    if not equals and not names_layers:
        return _parse_one(text)
    if not names_layers and not (name.strip() == "*" or name.strip().lstrip("-").isdecimal()):
        ambiguous = name in POLICIES and name in _names(POLICIES[name])
        example = f"{name}:{text}" if ambiguous else "streaming:sinks=4,window=252"
        raise UserError(f"fields follow the name and a colon, as in {example}, got {text!r}")
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
            raise UserError(f"layer {layer} is named twice in {text!r}; remove the duplicate")
        named[layer] = _parse_one(rest)
    numbers = [int(layer) for layer in named if layer != "*"]
    if layers is None:
        if "*" in named:
            raise UserError(f"{text!r} names all other layers with *: give layers=, their number")
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


def format_policy(policies: Policy | Sequence[Policy]) -> str:
    """The string that `parse_policy` reads back as the same policies."""
    if not isinstance(policies, (tuple, list)):
        return _format_one(policies)
    policies = [_without_layer(policy) for policy in policies]
    if len(set(policies)) == 1:
        return _format_one(policies[0])
    most_common, _ = Counter(policies).most_common(1)[0]
    named = [f"{i}={_format_one(p)}" for i, p in enumerate(policies) if p != most_common]
    return ";".join([*named, f"*={_format_one(most_common)}"])


def budgets_identity(policies: Sequence[Policy]) -> str:
    """A hash of the budgets that policies have from a file, which `format_policy` only names.

    Empty without such budgets. A stored cache belongs to these budgets, and the file may change.
    """
    budgets = [getattr(policy, "layer_budgets", None) for policy in policies]
    return f"{zlib.crc32(repr(budgets).encode()):08x}" if any(budgets) else ""


def by_layer(
    policy: str | Policy | Sequence[Policy | str], layers: int, windows: Sequence[int | None] = ()
) -> tuple[Policy, ...]:
    """One policy per layer.

    policy: one for all layers, or one per layer, each as a string or a value. windows: the model's
    own sliding window of each layer, None for full attention. A layer with a window was trained to
    see no more and no less, so it keeps its window and the policy is for the other layers. Where
    all layers have one, the policy is for those in which it looks back less. Layers that are named,
    in the string or by a sequence, get the policy that is named.
    """
    check_int("layers", layers)
    if isinstance(policy, str):
        policy = parse_policy(policy, layers)
    if isinstance(policy, (tuple, list)):
        policies = [_parse_one(entry) if isinstance(entry, str) else entry for entry in policy]
        if len(policies) != layers:
            raise UserError(f"give one policy per layer: got {len(policies)} for {layers} layers")
        for entry in policies:
            _check_policy(entry)
        return tuple(entry.for_layer(layer, layers) for layer, entry in enumerate(policies))
    _check_policy(policy)
    layer_windows = [*windows, *[None] * (layers - len(windows))]
    policies = [policy.for_layer(layer, layers) for layer in range(layers)]
    lookbacks = map(max_lookback, policies)
    mixed = None in layer_windows
    kept = [
        layer
        for layer, (width, lookback) in enumerate(zip(layer_windows, lookbacks, strict=True))
        if width is not None and (lookback > width or (mixed and policies[layer] != Window(width)))
    ]
    if kept and not isinstance(policy, Full):
        why = "and the policy is for the others" if mixed else "as the policy looks back further"
        warn(
            f"{len(kept)} layer(s) keep the model's own window of {layer_windows[kept[0]]} tokens, "
            f"{why}; `jaxkv policies --model` shows them"
        )
    return tuple(
        Window(layer_windows[layer]) if layer in kept else layer_policy
        for layer, layer_policy in enumerate(policies)
    )


def _check_policy(policy: object) -> None:
    """Raise UserError for what is no policy. Those of a caller need not derive from `Policy`."""
    if isinstance(policy, type) or not hasattr(policy, "for_layer"):
        raise UserError(
            f"a policy must be a string or an object, got {policy!r:.60}; "
            'give "streaming:sinks=4,window=252", or one per layer in a list'
        )


def max_lookback(policy: Policy, tokens: int | None = None) -> int | float:
    """The most tokens back that a query may look, in a text of `tokens` tokens (None: endless)."""
    return min(math.inf if tokens is None else tokens, policy.max_lookback)


def state_bytes(policies: Iterable[Policy], spec: Spec, batch: int, tokens: int = 0) -> int:
    """Bytes of all layers of `batch` sequences with room for `tokens` tokens; nothing is allocated.

    Counts the state before or after `finish_prefill`, whichever is larger, on device and host.
    Raises UserError where a policy refuses that many tokens.
    """
    check_int("batch", batch)
    check_int("tokens", tokens, 0)
    return sum(bytes_by_memory(policies, spec, batch, tokens))


def bytes_by_memory(
    policies: Iterable[Policy], spec: Spec, batch: int, tokens: int = 0
) -> tuple[int, int]:
    """The bytes of `state_bytes` on the device, and those in host memory."""
    policy_bytes = [
        [n * part for part in _bytes_of(p, spec, batch, tokens)]
        for p, n in Counter(policies).items()
    ]
    return tuple(map(sum, zip(*policy_bytes, strict=True))) if policy_bytes else (0, 0)


def host_bytes(policy: Policy, state: State) -> int:
    """Bytes of the arrays that the policy keeps in host memory."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(policy.leaves), strict=True)
    return nbytes([array for array, leaf in pairs if leaf.location == "host"])


@functools.lru_cache(maxsize=256)
def _bytes_of(policy: Policy, spec: Spec, batch: int, tokens: int) -> tuple[int, int]:
    def build() -> State:
        state = policy.init(spec, batch, jax.random.key(0))
        return policy.reserve(spec, state, tokens)

    before = jax.eval_shape(build)
    if policy.min_prompt is None:
        return nbytes(before), 0
    after = jax.eval_shape(lambda state: policy.finish_prefill(spec, state), before)
    host = host_bytes(policy, after)
    return max(nbytes(before), nbytes(after) - host), host


def describe() -> list[dict[str, object]]:
    """Every policy: its fields with types and defaults, what it caches, its bytes, its source.

    bytes: of one sequence in the layer EXAMPLE, by the number of its tokens.
    """
    return [
        {
            "name": name,
            "summary": kind.summary,
            "fields": {
                f.name: {"type": _type_name(kind, f.name), "default": _written(f.default)}
                for f in _fields(kind)
            },
            "bytes": {str(n): state_bytes((kind(),), EXAMPLE, 1, n) for n in EXAMPLE_TOKENS},
            "source": kind.source,
        }
        for name, kind in POLICIES.items()
    ]


def _fields(kind: type | Policy) -> list[dataclasses.Field]:
    """The fields that a string may set; `for_layer` sets the others."""
    return [field for field in dataclasses.fields(kind) if field.repr]


def _names(kind: type) -> list[str]:
    return [field.name for field in _fields(kind)]


def _type_name(kind: type, field: str) -> str:
    hint = _without_none(typing.get_type_hints(kind)[field])
    if hint is bool:
        return "true|false"
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return "|".join(map(str, choices)) or hint.__name__


def _without_none(hint: object) -> object:
    """The type of a field that may be left out: X of `X | None`."""
    types = [part for part in typing.get_args(hint) if part is not type(None)]
    return types[0] if len(types) < len(typing.get_args(hint)) else hint


def _parse_one(text: str) -> Policy:
    name, colon, fields = (piece.strip() for piece in text.partition(":"))
    if name not in POLICIES:
        raise UserError(f"unknown policy {name!r}{suggestion(name, POLICIES)}")
    kind = POLICIES[name]
    hints = typing.get_type_hints(kind)
    field_names = _names(kind)
    values: dict[str, object] = {}
    for part in fields.split(",") if colon else ():
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            raise UserError(
                f"a field must follow each : and , in {text!r}; remove the sign without one, or "
                f"give one of {', '.join(field_names)}"
            )
        if field == "storage" and field not in field_names:
            able = [name for name, kind in POLICIES.items() if "storage" in _names(kind)]
            raise UserError(
                f"{name} stores keys and values as floats and has no storage=, got {part!r}; leave "
                f"it out, or take one of {', '.join(able)}"
            )
        if field not in field_names:
            raise UserError(f"{name} has no field {field!r}{suggestion(field, field_names)}")
        if not equals:
            raise UserError(f"fields are written field=value, got {part!r} in {text!r}")
        if field in values:
            raise UserError(f"{field} is given twice in {text!r}; remove the duplicate")
        hint = _without_none(hints[field])
        left_out = value == "none" and hint != hints[field]
        values[field] = None if left_out else _read_value(name, field, hint, value)
    return kind(**values)


def _read_value(name: str, field: str, hint: object, value: str) -> object:
    kind = POLICIES[name]
    if typing.get_origin(hint) is typing.Literal:
        check_choice(f"{name}: {field}", value, typing.get_args(hint))
        return value
    if hint is bool:
        check_choice(f"{name}: {field}", value, ("true", "false"))
        return value == "true"
    try:
        return hint(value)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}[hint]
        default = getattr(kind, field, None)
        example = f"; give one, as in {field}={default}" if isinstance(default, hint) else ""
        raise UserError(f"{name}: {field} must be {expected}, got {value!r}{example}") from None


def _format_one(policy: Policy) -> str:
    names = {kind: name for name, kind in POLICIES.items()}
    if type(policy) not in names:
        return repr(policy)  # a user's own policy has no name in the table
    values = [(field, getattr(policy, field.name)) for field in _fields(policy)]
    fields = [
        f"{field.name}={_written(value)}"
        for field, value in values
        if value is not None or field.default is not None
    ]
    return f"{names[type(policy)]}:{','.join(fields)}"


def _without_layer(policy: Policy) -> Policy:
    """The policy before `for_layer`, which sets the fields that no string may set."""
    hidden = [field for field in dataclasses.fields(policy) if not field.repr]
    return dataclasses.replace(policy, **{field.name: field.default for field in hidden})


def _written(value: object) -> object:
    """A value as a policy string writes it; `none` for a field that is left out."""
    return str(value).lower() if value is None or isinstance(value, bool) else value
