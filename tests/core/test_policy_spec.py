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


# A case for each kind of refusal.
REFUSED = {
    "": "unknown policy ''",
    "streming": "did you mean 'streaming'.*there are full, window",
    "streaming:sink=3": r"streaming has no field 'sink'; did you mean 'sinks'",
    "streaming:x=3": r"has no field 'x'; there are sinks, window, positions, storage",
    "magicpig:storage=int8": "stores keys and values as floats and has no storage=",
    "balance:temperature=0.1": "has no field 'temperature'; there are .*, key_scale",
    "pyramidkv:layer=2": "pyramidkv has no field 'layer'",
    "window=64": "fields follow the name and a colon, as in window:window=64, got",
    "streaming:sinks=4,": "a field must follow each : and , in 'streaming:sinks=4,'",
    "streaming:sinks": "fields are written field=value, got 'sinks'",
    "streaming:sinks=1,sinks=2": "sinks is given twice",
    "streaming:sinks=2.5": "sinks must be a whole number, got '2.5'",
    "streaming:sinks=-1": "sinks must be 0 or more, got -1",
    "streaming:window=0": "window must be at least 1, got 0",
    "streaming:storage=int3": "storage must be one of float, int8, got 'int3'; did you mean 'int8'",
    "balance:mode=pair": "mode must be one of walk, pairs, coin, got 'pair'; did you mean 'pairs'",
    "odd:exact=yes": "exact must be one of true, false, got 'yes'; use one of these",
    "odd:rate=fast": "rate must be a number, got 'fast'",
    "0=full;x=full": "are written LAYER=POLICY;...;.*got 'x=full'",
    "full;*=full": "are written LAYER=POLICY;...;.*got 'full'",
    "-1=full": "got '-1=full'",
    "0=full;00=window": "layer 0 is named twice",
    "0=full;2=full": "layer 1 has no policy .* add .*=POLICY",
    "0=full;*=window": "names all other layers with .*: give layers=",
    "full:max=0": "max and start must be at least 1.*try start=512,max=4096",
    "full:start=0": "at least 1",
    "h2o:heavy=0": "heavy and window must be at least 1",
    "reservoir:sample=0": "sample must be at least 1, got 0",
    "reservoir:scheme=geometric,weighted=true": "weighted=true belongs to scheme=uniform",
    "reservoir:weighted=true,exponent=nan": "exponent must be from 0 to 1, got nan",
    "balance-stream:exponent=0.25": "exponent=0.25 belongs to weighted=true",
    "balance-stream:block=24": "block must be 2, 4, 8, ..., got 24",
    "balance-stream:levels=0": "levels must be at least 1, got 0",
    "stratified:sample=100": "sample must be 2, 4, 8, ..., got 100",
    "balance:rounds=-1": "rounds must be from 1 to 10, got -1; try rounds=2",
    "balance:start=0": "got 32, 32 and 0; try .*start=512",
    "balance:start=8,storage=int8": "start must be at least sinks with storage=int8, got 8",
    "balance:c=inf": "c must be 0 or more and finite, got inf",
    "balance:key_scale=0": "key_scale must be above 0",
    "balance:rounds=3,block=12": "a multiple of 2.rounds.*block=12 and rounds=3",
    "balance:weights=published": "weights=published belong to mode=walk",
    "snapkv:capacity=32": "capacity must be from 33 beside window=32, .* got 32",
    "snapkv:kernel=4": "kernel must be one of 1, 3, 5 to 1023, got 4; try kernel=7",
    "snapkv:kernel=1025": "to 1023, got 1025",
    "pyramidkv:beta=0": "beta must be at least 1",
    "keydiff:keys=raw": "keys must be one of rotated, unrotated, got 'raw'",
    "snapkv:budgets=per_head": "budgets must be one of equal, adaptive, calibrated, got 'per_head'",
    "retrieval:capacity=36": "from 37 beside sinks=4 and window=32, and .* got 36 and 512",
    "tova:capacity=0": "capacity must be from 1 and start from 1, .* got 0 and 512",
    "rkv:mix=2": "mix must be from 0 to 1 and threshold.* got 2.0 and 0.5; try mix=0.1",
    "rkv:capacity=8": "capacity must be from 9 beside window=8, .* got 8",
    "vase:large=nan": "large must be from 0 to 1, got nan; try large=0.25",
    "vase:large=inf": "large must be from 0 to 1, got inf",
    "vase:large=0": "must be at least sinks and at most capacity - window, got 0, 4 and 960",
    "vase:capacity=12,window=4": "got 3, 4 and 8; raise capacity, or lower sinks",
    "vase:sinks=-1": "sinks must be 0 or more, got -1; try sinks=4",
    "triattention:furthest=0": "furthest must be from 1 to 2.31 - 1, got 0",
    "tova:start=64": "start=64 belongs .* every=1 .*; leave start out, or give every=none",
    "keydiff:capacity=0": "capacity must be from 1 and start from 1, .* got 0 and 512",
    "keydiff:every=0": "every must be from 1 to 1073740800 tokens, got 0; try every=128",
    "keydiff:positions=absolute": "positions=absolute belongs to every=N, .* try every=128",
    "retrieval:every=8,start=16": "start=16 belongs to a cache that grows, .*every=8",
    "snapkv:every=8,positions=near": "positions must be one of relative, absolute, got 'near'",
    "keydiff:every=few": "every must be a whole number, got 'few'",
    "balance:every=8": "balance has no field 'every'",
    "expected-attention:future=0": "future must be at least 1, got 0",
    "expected-attention:future=65537": "future must be at most 65536, got 65537; use 65536 or less",
    "expected-attention:sinks=-1": "sinks and epsilon must be 0 or more, got -1 and 0.0; try sinks",
    "balance:mode=coin,c=0.9": "mode=coin reads no keys, so not c=0.9; leave it out",
    "rkv:window=0": "got 0, 0 and 512; try window=8,start=512",
    "magicpig:K=17": r"K must be from 1 to 16, got 17; try K=10",
    "magicpig:L=1": r"L must be from 2 to 4096, got 1; try L=150",
    "magicpig:budget=65536": r"budget must be from 1 to 65535, got 65536; try budget=4096",
    "magicpig:u_floor=nan": r"u_floor must be from 0 to less than 1, got nan",
    "magicpig:tail=0": r"tail must be from 1 to 1073741824, got 0; try tail=1024",
    "topk:share=nan": "share must be above 0 and at most 1, got nan; try share=0.1",
    "topk:start=0": "got 4, 64 and 0",
    "loki:dimensions=0": "dimensions must be above 0 and at most 1, got 0.0; try dimensions=0.25",
    "topp:mass=1.5": "mass must be above 0 and at most 1, got 1.5; try mass=0.9",
    "quest:page=0": "page and fewest must be at least 1, got 0 and 3; try page=16,fewest=3",
    "vattention:top=-0.1": "top must be from 0 to 1, got -0.1; try top=0.05",
    "vattention:base=0": "base must be above 0 and at most 1, got 0.0; try base=0.025",
    "vattention:epsilon=nan": "epsilon must be between 0 and 1, got nan; try epsilon=0.05",
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_strings_are_refused(text, odd):
    with pytest.raises(UserError, match=REFUSED[text]):
        parse_policy(text)


def test_unknown_and_missing_layers_are_refused():
    with pytest.raises(UserError, match="layer 4 does not exist: the model has layers 0 to 3"):
        parse_policy("4=full;*=window", 4)
    with pytest.raises(UserError, match="layer 1 has no policy"):
        parse_policy("0=full", 2)
    with pytest.raises(UserError, match="one policy per layer: got 2 for 3 layers"):
        by_layer([Full(), Full()], 3)


def test_a_layer_keeps_its_window_by_its_own_budget():
    text = "pyramidkv:capacity=64,window=8,beta=4,every=8"
    with pytest.warns(UserWarning, match="1 layer.s. keep the model's own window of 100 tokens"):
        first, *others = by_layer(text, 3, (100, 100, 100))
    assert first == Window(100) and others == list(by_layer(text, 3))[1:]


def test_the_models_own_windows(pytestconfig):
    windows = (None, 24, None, 24)
    assert by_layer("full", 4, windows) == (Full(), Window(24), Full(), Window(24))
    assert by_layer(Window(24), 4, windows) == (Window(24),) * 4
    for window in (10, 21):  # whether the policy looks back less or further
        with pytest.warns(
            UserWarning, match="2 layer.s. keep the model's own window of 24 tokens, and the policy"
        ) as caught:
            policies = by_layer(f"streaming:sinks=4,window={window}", 4, windows)
        assert policies == (Streaming(4, window), Window(24)) * 2
    # Where all layers have a window, the policy would be for none.
    assert by_layer("streaming:sinks=4,window=20", 2, (24, 24)) == (Streaming(4, 20),) * 2
    with pytest.warns(UserWarning, match="as the policy looks back further"):
        assert by_layer("streaming:sinks=4,window=21", 2, (24, 24)) == (Window(24),) * 2
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


def test_bytes_equal_those_of_the_arrays():
    spec, batch, tokens = dataclasses.replace(SPEC, dtype="bfloat16"), 3, 70
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
