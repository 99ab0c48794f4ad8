"""Learned memory: pairs of keys and values that are trained for a document."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models import compaction, sinks
from jaxkv.models.published import open_published
from jaxkv.models.score import encode
from jaxkv.models.serving import make_model
from jaxkv.models.view import check as check_view
from jaxkv.rotary import rotary
from tests import oracle
from tests.test_rotary import KINDS, frequencies_of
from tests.tiny import write_tiny

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")

SLOTS = 8
ROOMY = (
    "full",
    "streaming:sinks=8,window=64",
    "reservoir:sinks=8,window=64,sample=16",
    "balance:sinks=8,window=32",
    "snapkv:capacity=60,window=8",
    "topk:sinks=8,window=32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "model", max_position_embeddings=512)


@pytest.fixture(scope="module")
def llm(folder) -> models.Llm:
    return models.load(folder, "float32")


@pytest.fixture(scope="module")
def document(llm) -> list[int]:
    text = "".join(f"Item {n} costs {n * n} coins. " for n in range(8))
    return encode(llm, text)


@pytest.fixture(scope="module")
def trained(llm, document) -> tuple[compaction.Pairs, list[float]]:
    losses: list[float] = []
    with jax.numpy_dtype_promotion("standard"):
        pairs = compaction.compact(
            llm, document, SLOTS, steps=30, batch=4, lr=5e-2,
            progress=lambda _, loss: losses.append(loss),
        )  # fmt: skip
    return pairs, losses


@pytest.fixture(scope="module")
def path(trained, llm, folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("memory") / "memory.safetensors"
    of = open_published(folder).fingerprint()
    return sinks.write(file, trained[0].weights, llm.config.layers, of)


def after(llm, pairs: compaction.Pairs, ids: list[int], policy: str = "full") -> np.ndarray:
    """The logits after some tokens that follow the pairs."""
    with_pairs = models.Llm(**vars(llm) | {"weights": llm.weights | pairs.weights})
    stream = models.Stream(with_pairs, policy)
    stream.prefill([ids])
    return np.asarray(stream.decoding.logits)


def test_untrained_pairs_equal_the_cache_of_snapkv(llm, document):
    known = compaction.read(llm, document, SLOTS)
    follows = document[5:15]
    stream = models.Stream(llm, f"snapkv:capacity={SLOTS},window={SLOTS // 2}")
    stream.prefill([document])
    stream.finish_prefill()
    stream.prefill([follows])
    wanted = np.asarray(stream.decoding.logits)
    found = after(llm, compaction.pairs_of(llm, known, SLOTS), follows)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert np.abs(wanted - after(llm, compaction.Pairs(*pairs_of_ones(llm)), follows)).max() > 1e-3


@pytest.mark.parametrize("scaling", KINDS, ids=lambda scaling: scaling["kind"])
def test_pairs_have_keys_before_rotation_and_without_a_factor(rng, scaling):
    """Each key, rotated to its slot, is as far from the next token as it was in the document."""
    length, window = 40, SLOTS // 2
    frequencies = frequencies_of(16, 1e4, scaling)
    heads = rng.normal(size=(2, SLOTS, 16))  # before rotation
    positions = np.sort(rng.choice(length, SLOTS, replace=False))
    cached = np.stack([oracle.rotate(head, positions, frequencies) for head in heads])[None]
    split = (jnp.asarray(part, jnp.float32) for part in np.split(cached, [SLOTS - window], axis=2))
    state = SimpleNamespace(**{n: (a, a) for n, a in zip(("sample", "dense"), split, strict=True)})
    llm = SimpleNamespace(spec=SimpleNamespace(encoding=rotary(16, 1e4, scaling)))
    pairs = compaction.pairs_of(llm, SimpleNamespace(compressed=[state], length=length), SLOTS)
    moved = positions - length + SLOTS - np.arange(SLOTS)
    expected = [oracle.rotate(head, moved, (frequencies[0], 1.0)) for head in heads]
    np.testing.assert_allclose(pairs.keys[0], expected, atol=1e-4)


def pairs_of_ones(llm) -> list[jax.Array]:
    shape = (llm.config.layers, llm.config.kv_heads, SLOTS, llm.config.head_dim)
    return [jnp.ones(shape)] * 2


def test_the_loss_falls_and_the_model_stays(llm, folder, trained):
    _, losses = trained
    assert len(losses) == 30 and np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    published = models.load(folder, "float32").weights
    assert published.keys() == llm.weights.keys()
    for name, weight in published.items():
        np.testing.assert_array_equal(weight, llm.weights[name])


def test_all_pairs_of_all_layers_have_a_gradient(llm, document):
    known = compaction.read(llm, document, SLOTS)
    texts = compaction.training_texts(llm, document, known, seed=0)[:4]
    targets = compaction.follow_full(llm, known, texts)
    pairs = compaction.pairs_of(llm, known, SLOTS)
    given = llm.config, llm.spec, llm.weights
    gradient = jax.grad(lambda p: compaction.divergence_of(*given, p, texts, targets))(pairs)
    for array in gradient:
        assert np.all(np.abs(array).sum(axis=3) > 0)


def test_a_file_gives_the_same_logits(llm, folder, trained, path, document):
    loaded = models.load(folder, "float32", sinks=path)
    assert loaded.sink_pairs == SLOTS
    stream = models.Stream(loaded, "full")
    stream.prefill([document[:9]])
    wanted = after(llm, trained[0], document[:9])
    np.testing.assert_array_equal(stream.decoding.logits, wanted)
    assert loaded.fingerprint() != llm.fingerprint()


@pytest.mark.parametrize("policy", ROOMY)
def test_every_policy_caches_the_pairs_as_first_tokens(llm, trained, policy):
    ids = list(range(40, 70))
    wanted = after(llm, trained[0], ids)
    np.testing.assert_allclose(after(llm, trained[0], ids, policy), wanted, atol=2e-5)


def test_a_window_keeps_the_pairs_that_are_sinks(llm, trained):
    """After many tokens a cache whose sinks are the pairs still depends on them."""
    ids, ones = list(range(40, 140)), compaction.Pairs(*pairs_of_ones(llm))
    kept, lost = f"streaming:sinks={SLOTS},window=16", "window:window=16"
    differ = [np.abs(after(llm, trained[0], ids, p) - after(llm, ones, ids, p)).max()
              for p in (kept, lost)]  # fmt: skip
    assert differ[0] > 1e-3 and differ[1] < 1e-3 * differ[0] + 1e-5


def test_generate_compiles_ahead_for_the_pairs(folder, path):
    """Caches that grow have room for them, and a batch begins with them in every sequence."""
    loaded = models.load(folder, "float32", sinks=path)
    prompts = ["Item 3 costs", "Item"]
    both = models.generate(loaded, prompts, policy="full:start=4", max_new_tokens=12)
    alone = [models.generate(loaded, p, policy="full:start=4", max_new_tokens=12) for p in prompts]
    assert [a.tokens for a in both] == [a.tokens for a in alone]


def test_other_commands_refuse_pairs(folder, path):
    loaded = models.load(folder, "float32", sinks=path)
    with pytest.raises(UserError, match="learned keys and values from a file"):
        make_model(loaded)
    with pytest.raises(UserError, match="leave out their --sinks"):
        check_view(loaded, "window:window=8", 20, 10, None)


def test_a_stopped_training_gives_nothing(llm, document):
    steps: list[int] = []
    found = compaction.compact(
        llm, document, SLOTS, steps=50, progress=lambda step, _: steps.append(step),
        stopped=lambda: len(steps) == 2,
    )  # fmt: skip
    assert found is None and steps == [1, 2]


def test_what_cannot_be_trained(llm, folder, document, path):
    cases = {
        "at least 2, got 1": (llm, document, 1),
        "more tokens than slots, got 8 and 8": (llm, document[:8], SLOTS),
        "at most 384 tokens": (llm, document * 9, SLOTS),
        "no other learned pairs": (models.load(folder, "float32", sinks=path), document, SLOTS),
    }
    for message, given in cases.items():
        with pytest.raises(UserError, match=message):
            compaction.check(*given)


def test_files_of_another_shape_and_another_model(llm, folder, path, tmp_path):
    of = open_published(folder).fingerprint()
    layers = llm.config.layers
    bad = tmp_path / "bad.safetensors"
    pairs = {name: np.ones((layers, 1, SLOTS, 4)) for name in (sinks.SINK_KEYS, sinks.SINK_VALUES)}
    keys_alone = {sinks.SINK_KEYS: pairs_of_ones(llm)[0]}
    for weights in (pairs, keys_alone):
        sinks.write(bad, weights, layers, of)
        with pytest.raises(UserError, match="which is no sink"):
            models.load(folder, sinks=bad)
    other = write_tiny(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="another model"):
        models.load(other, sinks=path)
