"""The computations of the notebooks, each against a second way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxkv import models
from jaxkv.colab import attention, balance, cached_tokens, conversations, letters, runtime
from jaxkv.models.generation.serving import make_engine
from jaxkv.models.network import uncached
from jaxkv.models.training import letters as stream
from jaxkv.serve.engine import PrefixConfig, Request, answer


@pytest.fixture(scope="module")
def llm():
    return models.load()


def test_a_window_caches_only_the_end(llm):
    ids = runtime.passage(llm, 20)
    settings = {"window": "window:window=5", "full": "full"}
    coverages = cached_tokens.measure_coverage(llm, ids, settings)
    np.testing.assert_array_equal(coverages["window"].mean, np.arange(20) >= 15)
    assert coverages["window"].share(slice(15, 20)) == 1 and (coverages["full"].mean == 1).all()
    lines = repr(cached_tokens.size_table(coverages, settings)).splitlines()
    assert lines[1].split()[:4] == ["window", "5", "5", "5"] and "full" in lines[2]
    window = {"window": coverages["window"]}
    marked = [cached_tokens.highlight(llm, ids[:n], window).data.count("0.38") for n in (15, 20)]
    assert marked == [0, 1]  # one run of five tokens with weight 1 of 4


def test_norms_are_those_of_the_signed_sums():
    """The walk's vectors written out as the series of the exponential kernel, by degree."""
    random = np.random.default_rng(0)
    points, signs = random.normal(size=(7, 2)) / 2, random.choice([-1, 1], (3, 7))
    x, y = (points - points.mean(axis=0)).T
    terms = [
        np.sqrt(balance.PLANE.key_scale ** (i + j)) * x**i * y**j
        / math.sqrt(math.factorial(i) * math.factorial(j))
        for i in range(16) for j in range(16)
    ]  # fmt: skip
    vectors = np.stack(terms, axis=1)
    sums = np.cumsum(signs[:, :, None] * vectors, axis=1)
    expected = np.linalg.norm(sums, axis=2) / np.sqrt((vectors**2).sum(axis=1).mean())
    np.testing.assert_allclose(balance.norms_of_sums(points, signs), expected, rtol=1e-6)


def test_a_prompt_that_is_not_compressed_has_no_error():
    methods = {
        "all": "snapkv:capacity=1056,window=32",
        "half": "uniform:rounds=1,sinks=0,window=32",
    }
    errors = balance.errors(methods, "nothing alike", 0)
    assert errors["all"] < 1e-5 and 0.1 < errors["half"] < 1


def test_recorded_heads_have_the_attention_of_the_model(llm):
    texts = np.array(runtime.passage(llm, 160), np.int32).reshape(2, 80)
    (heads,) = attention.record(llm, texts, [2]).values()
    forward = uncached.forward(llm.config, llm.weights, texts, uncached.attend_with_probabilities)[
        2
    ]
    actual = attention.weights(llm.spec, heads)
    np.testing.assert_allclose(actual, forward[2][:, :, -attention.QUERIES :], atol=1e-5)
    assert heads.v.shape == heads.k.shape


def test_cached_tokens_are_not_computed_and_answers_do_not_change(llm):
    ids = tuple(runtime.passage(llm, 200))

    def talk(engine):
        """Two turns of two users; a second turn begins with the first, without its answer."""
        turns = [[ids[:90], (*ids[:70], *ids[90:110])], [ids[:150], (*ids[:70], *ids[90:170])]]
        return [answer(engine, [Request(prompt, 8) for prompt in prompts]) for prompts in turns]

    engines = {
        name: make_engine(
            llm, "streaming:sinks=2,window=30", max_batch=4, chunk=32, prefix_cache=prefixes
        )
        for name, prefixes in (("recomputed", None), ("cached", PrefixConfig(num_blocks=8)))
    }
    recomputed, cached = conversations.serve(engines, talk, rounds=2).values()
    assert recomputed.tokens == cached.tokens and len(cached.tokens) == 8
    assert recomputed.bytes == 0 < cached.bytes and not recomputed.cached.any()
    assert (cached.computed + cached.cached == recomputed.computed).all()
    assert cached.cached.sum() >= 64 and cached.prompts.tolist() == [[90, 90], [150, 150]]
    assert cached.milliseconds.shape == (2, 2, 2) and (cached.milliseconds > 0).all()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model with a sink token after two training steps, its letters, and the triggers."""
    import jax

    from jaxkv.models.training.pretrain import pretrain
    from jaxkv.models.training.recipes import read_recipe

    folder, chain = tmp_path_factory.mktemp("letters"), stream.LetterChain(0)
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # of optax
        patch.setattr(stream, "LENGTH", 30_000)
        tokens = stream.write(chain, folder / "data")
        recipe = read_recipe("backcopy", ["sink_variant=token", "steps=2"])
        run = pretrain(recipe, tokens, folder / "run")
    return models.load(run), tokens, chain.triggers


def test_the_loss_by_position_is_that_of_one_sample_with_its_sink_token(trained, monkeypatch):
    llm, tokens, _ = trained
    monkeypatch.setattr(letters, "SAMPLES", 1)
    (sample,) = letters.held_out(llm, tokens, 1, 49)
    ids = [sample[0], *sample[2:]]  # the sink token replaces the first letter
    losses = np.concatenate([*models.losses(llm, ids, "full")])
    np.testing.assert_allclose(letters.losses_by_position(llm, tokens), losses, atol=1e-4)
