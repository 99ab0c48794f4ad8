"""Policies as text and back, one policy per layer, and bytes before allocation."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import pytest

import jaxkv
from jaxkv.contract import Policy
from jaxkv.errors import UserError
from jaxkv.policies import POLICIES, Full, Streaming, Window
from jaxkv.policy_spec import (
    by_layer,
    describe,
    format_policy,
    max_lookback,
    parse_policy,
    state_bytes,
)
from jaxkv.rotary import rotary
from jaxkv.state.batch import nbytes

SPEC = jaxkv.Spec(kv_heads=2, head_dim=8, scale=1.0, encoding=rotary(8, 10000.0))


@dataclasses.dataclass(frozen=True)
class Odd(Window):
    """Every type of field that a policy may have."""

    window: int = 3
    rate: float = 0.5
    exact: bool = False
    kind: Literal["one", "two"] = "one"


class Unlimited(Policy):
    """A policy that states no `max_lookback`."""


@pytest.fixture
def odd(monkeypatch):
    monkeypatch.setitem(POLICIES, "odd", Odd)


def random_policy(rng) -> Policy:
    """A policy with random settings."""
    return [
        lambda: Full(max=int(rng.integers(1, 10**9)), start=int(rng.integers(1, 999))),
        lambda: Window(int(rng.integers(1, 10**9))),
        lambda: Streaming(
            int(rng.integers(0, 99)),
            int(rng.integers(1, 10**6)),
            str(rng.choice(["relative", "absolute"])),
        ),
        lambda: Odd(
            int(rng.integers(1, 9)),
            str(rng.choice(["float", "int8"])),
            float(rng.choice([1e-9, 0.1, 1 / 3, 2.0, 1e30])),
            bool(rng.integers(2)),
            str(rng.choice(["one", "two"])),
        ),
    ][rng.integers(4)]()


def test_parse_and_format_are_inverse(rng, odd):
    for _ in range(300):
        chosen = random_policy(rng)
        text = format_policy(chosen)
        assert parse_policy(text) == chosen
        assert parse_policy(f" {text.replace(',', ' , ').replace(':', ' : ', 1)} ") == chosen


def test_parse_and_format_are_inverse_for_layers(rng, odd):
    for _ in range(300):
        choices = [random_policy(rng) for _ in range(rng.integers(1, 4))]
        layers = tuple(choices[i] for i in rng.integers(0, len(choices), rng.integers(1, 12)))
        assert by_layer(format_policy(layers), len(layers)) == layers
        assert format_policy(by_layer(format_policy(layers), len(layers))) == format_policy(layers)


def test_policies_that_strings_name():
    assert parse_policy("full") == Full() and parse_policy("window:window=7") == Window(7)
    assert parse_policy("streaming") == Streaming(4, 252, "relative")
    assert parse_policy("streaming:window=9,sinks=0") == Streaming(0, 9)
    assert parse_policy("streaming:positions=absolute") == Streaming(positions="absolute")
    assert parse_policy("0=full;1=window") == (Full(), Window())
    mixed = (Full(), Window(8), Full(start=9), Window(8))
    assert parse_policy("0=full;*=window:window=8;2=full:start=9", 4) == mixed
    assert format_policy(Window(7)) == "window:window=7,storage=float"
    assert format_policy((Window(7), Window(7))) == "window:window=7,storage=float"
    assert (
        format_policy((Window(7), Window(8), Window(7)))
        == "1=window:window=8,storage=float;*=window:window=7,storage=float"
    )
    # Every field is written, so a string keeps its meaning when a default changes.
    named = "streaming:sinks=4,window=252,positions=relative,storage=float"
    assert format_policy(Streaming()) == named


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown policy ''"),
        ("streming", "unknown policy 'streming'; did you mean 'streaming'.*there are full, window"),
        ("Window", "did you mean 'window'"),
        ("zzz", r"unknown policy 'zzz'; there are full, window, streaming"),
        ("streaming:sink=3", r"streaming has no field 'sink'; did you mean 'sinks'"),
        (
            "streaming:storage=int3",
            "streaming: storage must be one of float, int8, got 'int3'; use one of these",
        ),
        ("magicpig:storage=int8", "magicpig stores keys and values as floats and has no storage="),
        ("streaming:cache=int8", "no field 'cache'; there are sinks, window, positions, storage"),
        ("magicpig:cache=int8", "magicpig has no field 'cache'; there are K, L, sinks"),
        ("balance:temperature=0.1", "balance has no field 'temperature'; there are .*, key_scale"),
        ("streaming:x=3", r"has no field 'x'; there are sinks, window, positions, storage"),
        ("window=64", "fields follow the name and a colon, as in window:window=64, got"),
        ("streaming sinks=4", "fields follow the name and a colon"),
        ("streaming:sinks", "fields are written field=value, got 'sinks'"),
        ("streaming:sinks=1,sinks=2", "sinks is given twice"),
        ("streaming:sinks=", "sinks must be a whole number, got ''"),
        ("streaming:sinks=2.5", "sinks must be a whole number, got '2.5'"),
        ("streaming:sinks=4=5", "sinks must be a whole number, got '4=5'"),
        ("streaming:sinks=-1", "sinks must be 0 or more, got -1"),
        ("streaming:window=0", "window must be at least 1, got 0"),
        ("window:window=-3", "window must be at least 1, got -3"),
        ("full:max=0", "max and start must be at least 1.*try max=4096"),
        (
            "streaming:positions=rank",
            "positions must be one of relative, absolute, got 'rank'; use one of these",
        ),
        ("odd:exact=yes", "exact must be one of true, false, got 'yes'; use one of these"),
        ("odd:rate=fast", "rate must be a number, got 'fast'"),
        ("odd:kind=three", "kind must be one of one, two, got 'three'"),
        ("0=full;x=full", "are written LAYER=POLICY;...;.*got 'x=full'"),
        ("0=full;window", "got 'window'"),
        ("-1=full", "got '-1=full'"),
        ("0=full;0=window", "layer 0 is named twice"),
        ("0=full;00=window", "layer 0 is named twice"),
        ("0=full;2=full", "layer 1 has no policy .* add .*=POLICY"),
        ("0=full;*=window", "names all other layers with .*: give layers="),
        ("0=;1=full", "unknown policy ''"),
    ],
)
def test_bad_strings_are_refused(text, message, odd):
    with pytest.raises(UserError, match=message):
        parse_policy(text)


def test_unknown_and_missing_layers_are_refused():
    with pytest.raises(UserError, match="layer 4 does not exist: the model has layers 0 to 3"):
        parse_policy("4=full;*=window", 4)
    with pytest.raises(UserError, match="layer 1 has no policy"):
        parse_policy("0=full", 2)
    with pytest.raises(UserError, match="one policy per layer: got 2 for 3 layers"):
        by_layer([Full(), Full()], 3)


def test_layer_numbers_may_have_leading_zeros():
    assert parse_policy("00=full;01=window") == (Full(), Window())


def test_the_models_own_windows(pytestconfig):
    windows = (None, 24, None, 24)
    assert by_layer("full", 4, windows) == (Full(), Window(24), Full(), Window(24))
    assert by_layer(Window(24), 4, windows) == (Window(24),) * 4
    assert by_layer("window:window=10", 4, windows) == (Window(10),) * 4
    assert by_layer("streaming:sinks=4,window=20", 4, windows) == (Streaming(4, 20),) * 4
    with pytest.warns(
        UserWarning, match="2 layer.s. keep the model's own window of 24 tokens"
    ) as caught:
        policies = by_layer("streaming:sinks=4,window=21", 4, windows)
    assert policies == (Streaming(4, 21), Window(24), Streaming(4, 21), Window(24))
    # The wrappers of the check of types are callers, too.
    assert pytestconfig.option.typecheck or caught[0].filename == __file__
    # Named layers, and policies given one per layer, override the model's windows.
    assert by_layer("1=window:window=99;*=full", 4, windows) == (Full(), Window(99), Full(), Full())
    assert by_layer([Full()] * 4, 4, windows) == (Full(),) * 4
    assert by_layer("full", 3) == (Full(),) * 3


def test_max_lookback():
    assert max_lookback(Full(max=500)) == 500 and max_lookback(Full(max=500), 100) == 100
    assert max_lookback(Unlimited()) == math.inf and max_lookback(Unlimited(), 100) == 100
    assert max_lookback(Window(9)) == 9 and max_lookback(Window(9), 4) == 4
    assert max_lookback(Streaming(4, 9)) == 13
    # With absolute positions the distance to the sinks is unbounded.
    assert max_lookback(Streaming(4, 9, "absolute")) == math.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [0, 70, 300])
def test_bytes_equal_those_of_the_arrays(tokens, batch, dtype):
    spec = dataclasses.replace(SPEC, dtype=dtype)
    policies = (Full(start=32, max=400), Window(9), Streaming(2, 5), Window(9))
    before = len(jax.live_arrays())
    computed = state_bytes(policies, spec, batch, tokens)
    assert len(jax.live_arrays()) == before, "state_bytes must allocate nothing"
    real = 0
    for chosen in policies:
        state = chosen.init(spec, batch, jax.random.key(0))
        state = chosen.reserve(spec, state, tokens)
        real += nbytes(state)
        assert nbytes(state) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert computed == real


def test_bytes_beyond_a_maximum_are_refused():
    with pytest.raises(UserError, match="at most 10 tokens and 11 are needed"):
        state_bytes((Full(max=10),), SPEC, 1, 11)
    size = 10**12
    assert state_bytes((Window(size),), SPEC, 1) == size * (2 * 2 * 8 * 4 + 4) + 4


def test_describe():
    table = {entry["name"]: entry for entry in describe()}
    assert list(table) == list(POLICIES)
    for name, entry in table.items():
        assert entry["summary"] and entry["source"]
        text = ",".join(f"{field}={v['default']}" for field, v in entry["fields"].items())
        assert parse_policy(f"{name}:{text}") == POLICIES[name]()
    assert table["streaming"]["fields"]["positions"] == {
        "type": "relative|absolute",
        "default": "relative",
    }
    constant = 256 * (2 * 3 * 64 * 4 + 4) + 4
    assert table["streaming"]["bytes"] == {"1024": constant, "16384": constant}


def test_every_policy_has_a_name_at_the_top():
    for kind in POLICIES.values():
        assert getattr(jaxkv, kind.__name__) is kind and kind.__name__ in dir(jaxkv)
