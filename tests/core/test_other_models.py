"""The recipes of docs/integration.md, run as the page prints them.

Nothing is registered or patched. Each recipe is one attention layer that stores the policy's state
in the way of its library. Prefill in chunks gives the outputs of the layer in plain JAX. The recipe
for Bonsai's Qwen3 runs on Bonsai's file, where it is present.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.rotary import Alibi, rotary
from jaxkv.state.batch import nbytes
from tests.conftest import COMPILED
from tests.pages import run_block

PAGE = "docs/integration.md"
WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 16, 8, 8, 31
SPEC = jaxkv.Spec(KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, rotary(HEAD_DIM, 1_000_000), group=2)
POLICY = jaxkv.policy("streaming:sinks=2,window=6")
BONSAI = "JAXKV_BONSAI"  # the environment variable with the path of Bonsai's file
NO_BONSAI = (
    f"no Bonsai: {BONSAI} must be the path of bonsai/models/qwen3/modeling.py of jax-ml/bonsai"
)


class Inputs(NamedTuple):
    x: jax.Array  # [B,T,D]
    positions: jax.Array  # [B,T]
    valid: jax.Array  # [B,T]


@pytest.fixture
def weights(rng):
    q, kv = (WIDTH, HEADS, HEAD_DIM), (WIDTH, KV_HEADS, HEAD_DIM)
    shapes = {"q": q, "k": kv, "v": kv, "o": (HEADS, HEAD_DIM, WIDTH)}
    return {n: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for n, s in shapes.items()}


@pytest.fixture
def chunks(rng):
    """Two sequences of 21 tokens in chunks of 7; the second one is padded on the left."""
    x = jnp.asarray(rng.normal(size=(2, 21, WIDTH)), jnp.float32)
    valid = jnp.arange(21)[None] >= jnp.asarray([[0], [3]])
    inputs = Inputs(x, jnp.cumsum(valid, axis=1, dtype=jnp.uint32) - 1, valid)
    return [Inputs(*(array[:, at : at + 7] for array in inputs)) for at in range(0, 21, 7)]


@pytest.fixture
def recipe():
    """Runs the block of the page that has a word, with other names if some are given.

    Returns all names of the page.
    """
    names = {"__name__": "integration", "batch": 2}
    for word in ("def attend(state", "def decoder("):
        run_block(PAGE, word, names)
    names |= {"spec": SPEC, "policy": POLICY}

    def run(word: str, **changes: object) -> SimpleNamespace:
        names.update(changes)
        run_block(PAGE, word, names)
        return SimpleNamespace(**names)

    return run


def outputs(step, state, chunks):
    """The outputs of all chunks. step: (state, *inputs) -> (out, state)."""
    outs = []
    for inputs in chunks:
        out, state = step(state, *inputs)
        outs.append(out)
    return np.concatenate(outs, axis=1)


def outputs_of_plain_jax(names, weights, chunks):
    step = jax.jit(lambda *inputs: names.attention(POLICY, SPEC, weights, *inputs))
    return outputs(step, POLICY.init(SPEC, 2, jax.random.key(0)), chunks)


def test_plain_jax(recipe, weights, chunks):
    outs = outputs_of_plain_jax(recipe("def reserve("), weights, chunks)
    # No query of the first chunk has lost a token, so its outputs are plain causal attention.
    x, positions, _ = (array[:1] for array in chunks[0])
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in "qkv")
    q, k = (SPEC.encoding.rotate(t, positions) for t in (q, k))
    full = jax.nn.dot_product_attention(q, k, v, scale=SPEC.scale, is_causal=True)
    expected = jnp.einsum("btnh,nhd->btd", full, weights["o"])
    np.testing.assert_allclose(outs[:1, :7], expected, atol=1e-5)


def test_a_scan_over_stacked_states_is_a_loop_over_layers(recipe, weights, chunks, rng):
    names = recipe("def reserve(")
    layers = [weights, {name: array[::-1] for name, array in weights.items()}]
    embedding, logits = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in
                         ((VOCAB, WIDTH), (WIDTH, VOCAB)))  # fmt: skip
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    params = {"embedding": embedding, "layers": stacked, "logits": logits}
    states = names.init_states([POLICY, POLICY], 2, jax.random.key(0))
    decoder = jax.jit(names.decoder, static_argnums=0, donate_argnums=2)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, 21)), jnp.int32)
    list_of_states = [POLICY.init(SPEC, 2, jax.random.key(0)) for _ in layers]
    for at, (_, *where) in enumerate(chunks):
        chunk = tokens[:, 7 * at : 7 * at + 7]
        actual, states = decoder(POLICY, params, states, chunk, *where)
        x = embedding[chunk]
        for index, layer in enumerate(layers):
            cache = list_of_states[index], x, *where
            out, list_of_states[index] = names.attention(POLICY, SPEC, layer, *cache)
            x = x + out
        np.testing.assert_allclose(actual, x @ logits, atol=1e-4)


def test_reserve_runs_over_a_tree_of_states(recipe):
    policy, names = jaxkv.policy("full:start=8"), recipe("def reserve(")
    states = {"a": {"state": policy.init(SPEC, 2, jax.random.key(0))}, "b": [None]}
    grown = names.reserve(policy, states, 40)
    assert nbytes(grown) == 2 * policy.bytes_per_sequence(SPEC, 40) > nbytes(states)


def test_linen(recipe, weights, chunks):
    pytest.importorskip("flax.linen", reason="no flax: pip install -e '.[models]'")
    names = recipe("class LinenAttention")
    layer = names.LinenAttention(POLICY, SPEC)
    cache = jax.jit(layer.init)(jax.random.key(0), *chunks[0])["cache"]
    params = {name: {"kernel": weight} for name, weight in weights.items()}
    step = lambda cache, *inputs: names.apply_linen(layer, params, cache, *inputs)
    expected = outputs_of_plain_jax(names, weights, chunks)
    np.testing.assert_allclose(outputs(step, cache, chunks), expected, atol=1e-5)


def test_linen_gives_each_layer_another_sample(recipe, chunks):
    linen = pytest.importorskip("flax.linen", reason="no flax: pip install -e '.[models]'")
    names = recipe("class LinenAttention")
    policy = jaxkv.policy("reservoir:sinks=1,window=2,sample=3")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x, positions, valid):
            for name in "ab":
                x = names.LinenAttention(policy, SPEC, name=name)(x, positions, valid)
            return x

    cache = jax.jit(Model().init)(jax.random.key(0), *chunks[0])["cache"]
    seeds = [np.asarray(cache[name]["state"].rng) for name in "ab"]
    assert (seeds[0] != seeds[1]).any()


def test_equinox(recipe, weights, chunks):
    eqx = pytest.importorskip("equinox", reason="no equinox: pip install equinox")
    names = recipe("class EquinoxAttention")

    def linear(weight):
        blank = eqx.nn.Linear(*weight.shape, use_bias=False, key=jax.random.key(0))
        return eqx.tree_at(lambda layer: layer.weight, blank, weight.T)

    matrices = {name: weights[name].reshape(WIDTH, -1) for name in "qkv"}
    matrices["o"] = weights["o"].reshape(-1, WIDTH)
    linears = {name: linear(matrix) for name, matrix in matrices.items()}
    layer = names.EquinoxAttention(**linears, policy=POLICY, spec=SPEC)
    step = lambda state, *inputs: names.apply_equinox((layer, *inputs), state)
    state = POLICY.init(SPEC, 2, jax.random.key(0))
    expected = outputs_of_plain_jax(names, weights, chunks)
    np.testing.assert_allclose(outputs(step, state, chunks), expected, atol=1e-5)
    assert state.k.is_deleted()  # donated


def test_nnx(recipe, weights, chunks):
    """The recipe for Bonsai on a layer that has Bonsai's names."""
    nnx = pytest.importorskip("flax.nnx", reason="no flax: pip install -e '.[models]'")
    if not hasattr(nnx.Variable, "set_value"):
        pytest.skip("variables of flax before 0.12 have no set_value")
    names = recipe("class PolicyCache")
    layer = SimpleNamespace(
        **{f"{n}_proj": lambda x, n=n: jnp.einsum("btd,dnh->btnh", x, weights[n]) for n in "qkv"},
        o_proj=lambda out: jnp.einsum("btnh,nhd->btd", out, weights["o"]),
        q_norm=lambda q: q,
        k_norm=lambda k: k,
    )
    (cache,) = names.policy_caches(POLICY, SPEC, 1, 2)
    outs = [names.policy_attention(layer, c.x, cache, c.valid.astype(jnp.int32)) for c in chunks]
    expected = outputs_of_plain_jax(names, weights, chunks)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=1e-5)


@pytest.mark.parametrize(
    "name, encoding",
    [("streaming:sinks=2,window=6", Alibi.of(HEADS)), ("full:start=8", SPEC.encoding)],
)
def test_shard_map(recipe, weights, chunks, name, encoding):
    spec, policy = dataclasses.replace(SPEC, encoding=encoding), jaxkv.policy(name)
    names = recipe("def sharded_attention(", spec=spec, policy=policy)
    split = jax.jit(lambda *inputs: names.sharded_attention(weights, *inputs), donate_argnums=0)
    alone = jax.jit(lambda *inputs: names.attention(policy, spec, weights, *inputs))
    full_state = policy.reserve(spec, policy.init(spec, 2, jax.random.key(0)), 21)
    split_state = policy.reserve(spec, names.split_state, 21)
    assert split_state.k.sharding.shard_shape(split_state.k.shape)[1] == 1  # KV head per device
    expected = outputs(alone, full_state, chunks)
    np.testing.assert_allclose(outputs(split, split_state, chunks), expected, atol=1e-5)
    assert split_state.k.is_deleted()  # donated


def bonsai() -> ModuleType:
    """Bonsai's file, from the environment or downloaded before; it is not part of jaxkv."""
    path = Path(os.environ.get(BONSAI, COMPILED.with_name("bonsai_qwen3.py")))
    if not path.is_file():
        pytest.skip(NO_BONSAI)
    pytest.importorskip("flax", reason="no flax: pip install -e '.[models]'")
    location = importlib.util.spec_from_file_location("bonsai_qwen3", path)
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


def bonsai_logits(forward, tokens, caches, prompt):
    """Logits [B,T,V] of the last prompt token and of those after it, decoded one by one."""
    columns = [tokens[:, :prompt], *jnp.split(tokens[:, prompt:], tokens.shape[1] - prompt, 1)]
    logits = []
    for column in columns:
        of_last, caches = forward(caches, column, 0)
        logits.append(of_last)
    return np.stack(logits, axis=1)


def test_qwen3_of_bonsai(recipe, rng, monkeypatch):
    """Equal logits without padding. A row that is padded on the left gives those of the row alone.

    With Bonsai's own cache it does not, because decode steps count padding as positions.
    """
    module = bonsai()
    from flax import nnx

    config = module.ModelConfig(
        num_layers=2, vocab_size=VOCAB, emb_dim=WIDTH, mlp_dim=32, num_heads=HEADS,
        head_dim=HEAD_DIM, num_kv_heads=KV_HEADS, rope_theta=1_000_000, rope_scaling_factor=8.0,
        local_rope_theta=1e4, norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    names = recipe("class PolicyCache")
    caches = lambda batch: names.policy_caches("full:start=32", SPEC, 2, batch)
    tokens = jnp.asarray(rng.integers(1, VOCAB, (2, 20)), jnp.int32)
    padded = tokens.at[1, :5].set(0)
    with jax.numpy_dtype_promotion("standard"):
        forward = functools.partial(module.forward, module.Qwen3(config, rngs=nnx.Rngs(0)))
        expected = bonsai_logits(
            forward, tokens, module.init_cache(config, 2, 12, 8, jnp.float32), 12
        )
        monkeypatch.setattr(module.Attention, "__call__", names.policy_attention)
        logits = bonsai_logits(forward, tokens, caches(2), 12)
        of_padded = bonsai_logits(forward, padded, caches(2), 12)
        alone = bonsai_logits(forward, tokens[1:, 5:], caches(1), 7)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(of_padded, np.concatenate([expected[:1], alone]), atol=1e-5)
