"""Sampling: equal to float64 numpy and to transformers; draws have the stated probabilities."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.sampling import (
    ALL_FILTERS,
    Knobs,
    Sampling,
    draw,
    draw_each,
    filter_logits,
    knobs_of_sequence,
)

V = 40
SETTINGS = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product(
        (0.3, 1.0, 2.5), (0, 1, 7), (0.4, 1.0), (0.0, 0.1), (0.5, 1.0, 1.7)
    )
]
jitted_filter_logits = jax.jit(filter_logits, static_argnums=0)
jitted_draw = jax.jit(lambda *args: draw(*args)[0], static_argnums=0)


def reference(sampling: Sampling, logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The probability of each token, computed by sequence and by filter."""
    probabilities_of_rows = []
    for row, old in zip(logits.astype(np.float64), seen, strict=True):
        penalty = np.where(row > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        row = np.where(old, row * penalty, row) / sampling.temperature
        if sampling.top_k:
            row[row < np.sort(row)[::-1][: sampling.top_k][-1]] = -np.inf
        share = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        chosen, total = [], 0.0
        for token in np.argsort(-share, kind="stable"):
            if total < sampling.top_p or sampling.top_p == 1:
                chosen.append(token)
            total += share[token]
        share = np.where(share >= share[chosen].min(), share, 0.0)
        share[share < sampling.min_p * share.max()] = 0.0
        probabilities_of_rows.append(share / share.sum())
    return np.stack(probabilities_of_rows)


def probabilities(sampling: Sampling, logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
    shaped = jitted_filter_logits(sampling.filters, sampling.knobs, logits.astype(np.float32), seen)
    return np.asarray(jax.nn.softmax(shaped, axis=-1))


def agree(actual: np.ndarray, expected: np.ndarray, sampling: Sampling) -> None:
    # Probabilities below 1e-30 may be 0 in float32.
    assert (actual[expected > 1e-30] > 0).all(), f"{sampling} lost a token"
    assert (expected[actual > 1e-30] > 0).all(), f"{sampling} kept a filtered token"
    np.testing.assert_allclose(actual, expected, atol=2e-6, err_msg=str(sampling))


def example(rng, batch: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(batch, V)).astype(np.float32) * 3, rng.random((batch, V)) < 0.3


def draws(sampling: Sampling, logits: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """`count` draws from the same logits, each with its own sequence and position."""
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), count))
    positions = np.arange(count, dtype=np.uint32) * 7
    logits = np.broadcast_to(logits.astype(np.float32), (count, len(logits)))
    seen = np.zeros(logits.shape, bool)
    return np.asarray(jitted_draw(sampling.filters, sampling.knobs, logits, seen, keys, positions))


def test_every_combination_equals_the_reference(rng):
    for sampling in SETTINGS:
        logits, seen = example(rng)
        agree(probabilities(sampling, logits, seen), reference(sampling, logits, seen), sampling)
    # There are 16 combinations of filters; the values are arguments.
    assert jitted_filter_logits._cache_size() <= 16


@pytest.mark.parity
def test_every_combination_equals_transformers(rng):
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    for sampling in SETTINGS:
        logits, _ = example(rng, batch=1)
        ids = rng.integers(0, V, (1, 9))
        seen = np.isin(np.arange(V), ids)[None]
        processors = model._get_logits_processor(
            GenerationConfig(
                do_sample=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p or None,
                repetition_penalty=sampling.repetition_penalty,
            ),
            input_ids_seq_length=9,
            encoder_input_ids=torch.tensor(ids),
            prefix_allowed_tokens_fn=None,
            logits_processor=LogitsProcessorList(),
            device="cpu",
        )
        expected = processors(torch.tensor(ids), torch.tensor(logits)).softmax(-1).numpy()
        agree(probabilities(sampling, logits, seen), expected, sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, top_p=0.8),
        Sampling(temperature=1.5, top_k=4, min_p=0.05),
    ],
)
def test_draws_have_the_stated_frequencies(sampling, rng):
    logits, count = rng.normal(size=8) * 1.5, 40_000
    expected = reference(sampling, logits[None], np.zeros((1, 8), bool))[0]
    actual = np.bincount(draws(sampling, logits, count), minlength=8) / count
    assert (actual[expected == 0] == 0).all()
    error = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(actual - expected) <= 4 * error).all()


def test_a_draw_depends_on_rng_and_position_alone(rng):
    logits, seen = example(rng, batch=200)
    sampling = Sampling(temperature=3.0)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 200)))
    positions = rng.integers(0, 2**32, 200, dtype=np.uint32)
    pick = partial(jitted_draw, sampling.filters, sampling.knobs)
    first = np.asarray(pick(logits, seen, keys, positions))
    order = rng.permutation(200)
    again = pick(logits[order], seen[order], keys[order], positions[order])
    assert (np.asarray(again) == first[order]).all(), "a draw depends on its place in the batch"
    assert (np.asarray(pick(logits, seen, keys, positions + np.uint32(1))) != first).mean() > 0.5
    assert (np.asarray(pick(logits, seen, keys[::-1].copy(), positions)) != first).mean() > 0.5


def test_greedy_choice(rng):
    logits, seen = example(rng)
    keys, positions = np.zeros((3, 2), np.uint32), np.zeros(3, np.uint32)
    settings = Sampling(top_k=2, top_p=0.1, min_p=0.5)  # greedy choice applies no filter
    assert settings.filters == Sampling().filters
    pick = partial(jitted_draw, settings.filters, settings.knobs)
    assert (np.asarray(pick(logits, seen, keys, positions)) == logits.argmax(-1)).all()
    assert (np.asarray(pick(np.zeros((3, V), np.float32), seen, keys, positions)) == 0).all()
    # With a penalty a seen token loses to the next one.
    best = np.eye(V, dtype=bool)[logits.argmax(-1)]
    punished = Sampling(repetition_penalty=1e6)
    second = jitted_draw(punished.filters, punished.knobs, logits, best, keys, positions)
    assert (np.asarray(second) == np.where(best, -np.inf, logits).argmax(-1)).all()


def test_tokens_that_tie_with_the_last_one_stay():
    logits, seen = np.array([[2.0, 1.0, 1.0, 1.0, 0.0]]), np.zeros((1, 5), bool)
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.6)):
        assert (probabilities(sampling, logits, seen)[0] > 0).tolist() == [
            True,
            True,
            True,
            True,
            False,
        ]
    level = np.zeros((1, 5))
    assert (probabilities(Sampling(1.0, top_k=1), level, seen) > 0).all()


@pytest.mark.parametrize(
    ("sampling", "scale", "allowed"),
    [
        (Sampling(1e-30), 1, {1}),
        (Sampling(1e-46), 1, {1}),  # 0 in float32
        (Sampling(1e-30, top_k=3, top_p=0.9, min_p=0.1), 1, {1}),
        (Sampling(1e30), 1, {0, 1, 2, 3}),
        (Sampling(1.0), 1e30, {1}),
        (Sampling(1e30), 1e30, {0, 1, 2, 3}),
        (Sampling(1.0, top_k=10**12), 1, {0, 1, 2, 3}),
        (Sampling(1.0, top_p=1e-30), 1, {1}),
        (Sampling(1.0, min_p=1.0), 1, {1}),
        (Sampling(1.0, min_p=1e-46), 1, {0, 1, 2, 3}),  # 0 in float32
        (Sampling(1.0, top_k=3, top_p=0.9, min_p=0.1), 1, {1, 3}),
    ],
)
def test_extreme_settings_allow_only_valid_tokens(sampling, scale, allowed):
    """No NaN, no token that was filtered out, no token with a logit of -inf."""
    logits = np.array([1.0, 3.0, -2.0, 2.9, -np.inf]) * scale
    shares = probabilities(sampling, logits[None], np.zeros((1, 5), bool))[0]
    assert set(np.flatnonzero(shares)) == allowed and not np.isnan(shares).any()
    drawn = set(draws(sampling, logits, 300).tolist())
    assert drawn <= allowed and (len(drawn) > 1 or len(allowed) == 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", float("inf")),
    ],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(UserError, match=rf"{field} must be .*, got {value}"):
        Sampling(**{field: value})


def test_settings_per_sequence_draw_the_same_as_alone(rng):
    """In batches with any other settings: all greedy, some with top-k or top-p, none with them."""
    settings = [Sampling(), Sampling(repetition_penalty=1.7), *SETTINGS[::7]]
    batch = len(settings)
    logits, seen = example(rng, batch)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), batch)))
    at = np.arange(batch, dtype=np.uint32)
    draw_all = jax.jit(draw_each)
    args = logits, seen, keys, at
    alone = [
        int(jitted_draw(sampling.filters, sampling.knobs, *(x[n : n + 1] for x in args))[0])
        for n, sampling in enumerate(settings)
    ]
    uncut = [n for n, sampling in enumerate(settings) if not sampling.top_k and sampling.top_p == 1]
    for group in (list(range(batch)), uncut, [0, 1]):
        knobs = [knobs_of_sequence(settings[n]) for n in group]
        stacked = Knobs(*map(np.stack, zip(*knobs, strict=True)))
        drawn, chosen_by = draw_all(stacked, *(x[group] for x in args))
        assert drawn.tolist() == [alone[n] for n in group]
        assert np.isfinite(chosen_by).all()
    assert len(set(alone)) > 3


def test_nothing_is_sorted():
    """A sort of the vocabulary takes longer than a decode step of a small model."""
    sampling = Sampling(temperature=1.0, top_k=3, top_p=0.5)
    knobs = Knobs(*(np.full(2, knob) for knob in knobs_of_sequence(sampling)))
    arguments = (np.zeros((2, V), np.float32), np.zeros((2, V), bool))
    rng, positions = np.zeros((2, 2), np.uint32), np.zeros(2, np.uint32)
    text = jax.jit(draw_each).lower(knobs, *arguments, rng, positions).as_text()
    assert "case" in text and "sort" not in text and "top_k" not in text


@pytest.mark.parametrize("top_p", [1.0, 1 - 1e-12], ids=["off", "1 in float32"])
def test_without_top_p_no_token_of_a_large_vocabulary_is_lost(top_p):
    """The running sum of 200,000 float32 probabilities passes 1 before the last token."""
    count = 200_000
    logits, seen = np.zeros((2, count), np.float32), np.zeros((2, count), bool)
    logits[:, 0] = 1.0  # otherwise all tokens tie
    sampling = Sampling(temperature=1.0, top_p=top_p)
    for used in (sampling, Sampling(temperature=1.0, top_p=0.5)):  # only one looks for a threshold
        jaxpr = jax.make_jaxpr(partial(filter_logits, used.filters))(used.knobs, logits, seen)
        assert ("scan" in str(jaxpr)) == (used is not sampling)
    pair = knobs_of_sequence(sampling), knobs_of_sequence(Sampling(temperature=1.0, top_p=0.5))
    knobs = Knobs(*map(np.stack, zip(*pair, strict=True)))
    kept = np.isfinite(np.asarray(jitted_filter_logits(ALL_FILTERS, knobs, logits, seen)))
    assert kept[0].all()
    assert np.isfinite(
        np.asarray(jitted_filter_logits(sampling.filters, sampling.knobs, logits, seen))
    ).all()
