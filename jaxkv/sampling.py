"""Sampling: temperature, top-k, top-p, min-p, repetition penalty, greedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.platform import cpu as xla_cpu
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

LARGEST = 1e38  # larger values overflow float32
TEMPERATURE = 0.8  # where a model publishes none: greedy text of small models soon repeats itself


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling. Temperature 0 is greedy.

    Order: repetition penalty, temperature, top-k, top-p, min-p.

    repetition_penalty: divides positive logits and multiplies negative logits of tokens that the
    sequence has already (Keskar et al. 2019). top_k: the k most likely tokens; 0 is off. top_p: the
    smallest set with that much probability; 1 is off. min_p: tokens at least that share as likely
    as the most likely; 0 is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kinds = Integral if name == "top_k" else Real
            if isinstance(value, bool) or not isinstance(value, kinds):
                expected = "a whole number" if name == "top_k" else "a number"
                raise UserError(
                    f"{name} must be {expected}, got {value!r}; leave it out for the default"
                )
        rules = (
            (0 <= self.temperature <= LARGEST, "temperature must be 0 or more and finite"),
            (self.top_k >= 0, "top_k must be 0 (off) or more"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p must be from 0 to 1"),
            (
                0 < self.repetition_penalty <= LARGEST,
                "repetition_penalty must be above 0 and finite",
            ),
        )
        for holds, rule in rules:
            if not holds:
                name = rule.split()[0]
                raise UserError(f"{rule}, got {getattr(self, name)}; leave it out for the default")

    @property
    def filters(self) -> Filters:
        """The parts that are compiled in; their values are arguments, so changing one is free."""
        stochastic = self.temperature > 0
        return Filters(
            stochastic=stochastic,
            top_k=stochastic and self.top_k > 0,
            # Compared as float32, which may round it to 1: off.
            top_p=stochastic and bool(self.knobs.top_p < 1),
            min_p=stochastic and self.min_p > 0,
            repetition=self.repetition_penalty != 1,
        )

    @property
    def knobs(self) -> Knobs:
        """The values of the settings, as arguments of the compiled program."""
        # A temperature that float32 rounds to 0 would be a division by zero.
        temperature = max(np.float32(self.temperature), np.finfo(np.float32).tiny)
        return Knobs(
            np.float32(temperature),
            np.int32(min(self.top_k, 2**31 - 1)),
            max(np.float32(self.top_p), np.finfo(np.float32).tiny),  # one token always stays
            np.float32(self.min_p),
            np.float32(self.repetition_penalty),
        )


class Filters(NamedTuple):
    """The parts of sampling that are compiled in. stochastic: a temperature above 0."""

    stochastic: bool
    top_k: bool
    top_p: bool
    min_p: bool
    repetition: bool


class Knobs(NamedTuple):
    """One number for all sequences, or one per sequence."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array


def draw(
    filters: Filters,
    knobs: Knobs,
    logits: Float32[Array, "B V"],
    seen: Bool[Array, "B V"],
    rng: UInt32[Array, "B 2"],
    positions: UInt32[Array, " B"],
) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """One token per sequence, and the largest logit, noise included, by which it was chosen.

    That logit is finite if all logits are. rng: PRNG key data, one key per sequence. A draw is a
    function of (rng, position).
    """
    logits = filter_logits(filters, knobs, logits, seen)

    def noise(rng: Array, position: Array) -> Array:
        rng = jax.random.fold_in(jax.random.wrap_key_data(rng), position)
        return jax.random.gumbel(rng, logits.shape[-1:], jnp.float32)

    if filters.stochastic:
        logits = logits + jax.vmap(noise)(rng, positions)
    return xla_cpu.argmax(logits)


ALL_FILTERS = Filters(stochastic=True, top_k=True, top_p=True, min_p=True, repetition=True)
MIN_P_ONLY = ALL_FILTERS._replace(top_k=False, top_p=False)
NEUTRAL = Knobs(np.float32(0), np.int32(2**31 - 1), np.float32(2), np.float32(0), np.float32(1))


def knobs_of_sequence(sampling: Sampling) -> Knobs:
    """The knobs of one sequence, for `draw_each`; a filter that is off changes no bit."""
    k = sampling.knobs
    return Knobs(
        np.float32(0) if sampling.temperature == 0 else k.temperature,
        k.top_k if sampling.top_k else NEUTRAL.top_k,
        k.top_p if k.top_p < 1 else NEUTRAL.top_p,
        k.min_p,
        k.repetition_penalty,
    )


def draw_each(
    knobs: Knobs,
    logits: Float32[Array, "B V"],
    seen: Bool[Array, "B V"],
    rng: UInt32[Array, "B 2"],
    positions: UInt32[Array, " B"],
) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """`draw` with knobs per sequence, those of `knobs_of_sequence` as [B].

    A sequence's token does not depend on the knobs of others. A filter that no sequence uses is not
    computed.
    """
    greedy = knobs.temperature == 0
    # Greedy sequences do not use their temperature; 1 avoids a division by zero.
    temperature = jnp.where(greedy, np.float32(1), knobs.temperature)
    above_zero = knobs._replace(temperature=temperature)
    penalty_only = Filters(stochastic=False, top_k=False, top_p=False, min_p=False, repetition=True)

    def draw_greedy() -> tuple[Array, Array]:
        return draw(penalty_only, above_zero, logits, seen, rng, positions)

    def draw_both(filters: Filters) -> tuple[Array, Array]:
        drawn = draw(filters, above_zero, logits, seen, rng, positions)
        return tuple(jnp.where(greedy, a, b) for a, b in zip(draw_greedy(), drawn, strict=True))

    cut = jnp.any(~greedy & ((knobs.top_k != NEUTRAL.top_k) | (knobs.top_p != NEUTRAL.top_p)))
    branch = jnp.where(jnp.all(greedy), 0, jnp.where(cut, 2, 1))
    branches = [draw_greedy, lambda: draw_both(MIN_P_ONLY), lambda: draw_both(ALL_FILTERS)]
    return jax.lax.switch(branch, branches)


def filter_logits(
    filters: Filters, knobs: Knobs, logits: Float32[Array, "B V"], seen: Bool[Array, "B V"]
) -> Float32[Array, "B V"]:
    """The logits to draw from, up to a constant per sequence; -inf where filtered out."""
    knobs = Knobs(*(jnp.reshape(knob, (-1, 1)) for knob in knobs))
    if filters.repetition:
        penalty = knobs.repetition_penalty
        penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, penalized, logits)
    if not filters.stochastic:
        return logits
    # At most 0, so that at a low temperature only tokens of negligible probability overflow.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / knobs.temperature
    if filters.top_k or filters.top_p:
        logits = _top_k_top_p(filters, knobs, logits)
    if filters.min_p:
        logits = jnp.where(logits >= jnp.log(knobs.min_p), logits, -jnp.inf)
    return logits


def _top_k_top_p(filters: Filters, knobs: Knobs, logits: Array) -> Array:
    """Top-k, then top-p of the remaining tokens. Tokens that tie with the last one stay.

    logits: at most 0. A sort of the vocabulary would take ten times as long. So a bisection over
    the bits of -logit, which order non-negative floats, finds the logit of the last token exactly.
    """
    magnitude, weights = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.int32), jnp.exp(logits)
    total, last = jnp.sum(weights, axis=-1, keepdims=True), jnp.int32(2**31 - 1)
    if filters.top_k:
        last = _bisect(logits, lambda limit: _count(magnitude < limit) < knobs.top_k)
        before = magnitude < last
        ties = jnp.exp(-jax.lax.bitcast_convert_type(last, jnp.float32))
        best = jnp.sum(jnp.where(before, weights, 0), axis=-1, keepdims=True)
        best += (knobs.top_k - _count(before)).astype(jnp.float32) * ties
        total = jnp.where(knobs.top_k < logits.shape[-1], best, total)
    if filters.top_p:
        # A token stays while the tokens before it have less than top_p; so the first always stays.
        mass_limit = knobs.top_p * total

        def stays(limit: Array) -> Array:
            return (
                jnp.sum(jnp.where(magnitude < limit, weights, 0), axis=-1, keepdims=True)
                < mass_limit
            )

        last = jnp.minimum(last, _bisect(logits, stays))
    return jnp.where(magnitude <= last, logits, -jnp.inf)


def _count(chosen: Bool[Array, "B V"]) -> Int32[Array, "B 1"]:
    return jnp.sum(chosen, axis=-1, keepdims=True, dtype=jnp.int32)


def _bisect(
    logits: Float32[Array, "B V"], holds: Callable[[Int32[Array, "B 1"]], Bool[Array, "B 1"]]
) -> Int32[Array, "B 1"]:
    """For each sequence the largest whole number from 0 to 2^31 - 1 of which `holds` is true.

    If it is true of a number, it must be true of all smaller ones.
    """

    def set_bit(number: Array, current: Array) -> Array:
        larger = current | (jnp.int32(1) << (30 - number))
        return jnp.where(holds(larger), larger, current)

    return jax.lax.fori_loop(0, 31, set_bit, jnp.zeros((logits.shape[0], 1), jnp.int32))
