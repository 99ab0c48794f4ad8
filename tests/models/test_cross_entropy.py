"""The loss in blocks and its hand-written gradient equal plain JAX over all logits at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxkv.models.network.cross_entropy import cross_entropy, target_losses
from jaxkv.platform import cpu as xla_cpu

VOCAB, DEPTH, ROWS, TOKENS = 37, 12, 4, 23
Z_LOSS = 0.05


def arrays(dtype="float32"):
    random = np.random.default_rng(0)
    head = random.normal(size=(VOCAB, DEPTH)).astype(np.float32)
    hidden = random.normal(size=(ROWS, TOKENS, DEPTH)).astype(np.float32)
    targets = random.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
    share = random.random((ROWS, TOKENS)).astype(np.float32)
    share[:, 0] = 0
    return jnp.asarray(head), jnp.asarray(hidden, dtype), targets, share / share.sum()


def plain(head, hidden, targets, share):
    """The definition, over all logits at once."""
    logits = jnp.einsum("vd,btd->btv", head, hidden.astype(head.dtype))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    losses = log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.sum(share * (losses + Z_LOSS * log_z**2)), losses


@pytest.mark.parametrize("logits_at_once", [1, VOCAB * ROWS * 5, VOCAB * ROWS * 8, 2**30])
def test_any_block_size_gives_the_loss_and_its_gradient(monkeypatch, logits_at_once):
    """Blocks of 1, 5, 8 and all 23 tokens. The last block is shorter for 5 and 8."""
    monkeypatch.setattr(xla_cpu, "LOGITS_AT_ONCE", {"cpu": logits_at_once})
    head, hidden, *rest = arrays()
    grad = lambda f: jax.value_and_grad(lambda *a: f(*a)[0] * 3, argnums=(0, 1))
    cost, gradients = grad(lambda *a: cross_entropy(*a, Z_LOSS))(head, hidden, *rest)
    expected_cost, expected_gradients = grad(plain)(head, hidden, *rest)
    np.testing.assert_allclose(cost, expected_cost, rtol=1e-6)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)
    alone, losses = jax.jit(lambda *a: cross_entropy(*a, Z_LOSS))(head, hidden, *rest)
    np.testing.assert_allclose(3 * alone, expected_cost, rtol=1e-6)
    np.testing.assert_allclose(losses, plain(head, hidden, *rest)[1], atol=2e-6)


@pytest.mark.parametrize("logits_at_once", [VOCAB * 5, 2**30])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_over_a_mesh(monkeypatch, size, logits_at_once):
    monkeypatch.setattr(xla_cpu, "LOGITS_AT_ONCE", {"cpu": logits_at_once})
    mesh = Mesh(np.array(jax.devices()[:size]), ("data",))
    args = arrays()
    grad = lambda f: jax.value_and_grad(f, argnums=(0, 1), has_aux=True)
    results = jax.jit(grad(lambda *a: cross_entropy(*a, Z_LOSS, mesh)))(*args)
    for actual, expected in zip(
        jax.tree.leaves(results), jax.tree.leaves(grad(plain)(*args)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=4e-6)


def test_the_logits_of_a_whole_batch_are_never_in_memory(monkeypatch):
    def sizes(at_once):
        monkeypatch.setattr(xla_cpu, "LOGITS_AT_ONCE", {"cpu": at_once})
        step = jax.value_and_grad(lambda *a: cross_entropy(*a, Z_LOSS)[0], argnums=(0, 1))
        text = jax.jit(lambda *a: step(*a)).lower(*arrays()).compile().as_text()
        shapes = re.findall(r"f32\[([\d,]+)\]", text)
        return {int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes}

    assert max(sizes(2**30)) >= VOCAB * ROWS * TOKENS
    assert max(sizes(VOCAB * ROWS)) <= max(VOCAB * DEPTH, 2 * DEPTH * ROWS * TOKENS)


def test_gradients_keep_the_dtypes_of_their_arguments():
    head, hidden, *rest = arrays("bfloat16")
    gradient = jax.grad(lambda *a: cross_entropy(*a, Z_LOSS)[0], argnums=(0, 1))
    gradients = gradient(head, hidden, *rest)
    assert [leaf.dtype for leaf in gradients] == [jnp.float32, jnp.bfloat16]
    expected_gradients = gradient(head, hidden.astype(jnp.float32), *rest)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        off = np.linalg.norm(np.asarray(actual, np.float32) - np.asarray(expected))
        assert off < 0.02 * np.linalg.norm(expected)


def test_losses_alone_have_no_gradient():
    head, hidden, *rest = arrays()
    assert not jax.grad(lambda h: jnp.sum(cross_entropy(h, hidden, *rest, Z_LOSS)[1]))(head).any()


def test_losses_of_given_logits(rng):
    logits = jnp.asarray(rng.normal(size=(2, 3, VOCAB)), jnp.float32)
    targets = rng.integers(0, VOCAB, (2, 3))
    expected = -np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), targets[..., None], axis=-1
    )
    np.testing.assert_allclose(target_losses(logits, jnp.asarray(targets)), expected[..., 0], 1e-5)
