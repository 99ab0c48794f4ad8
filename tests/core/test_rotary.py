"""Position encodings: every rotary scaling equals its formula at any position; ALiBi."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.rotary import Alibi, Rotary, rotary
from tests.core import oracle

# A rope scaling in Hugging Face's field names, and its frequencies and amplitude by definition.
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "kind": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}

# The pair with one rotation in the original length is beyond the last pair, and the pair with 32
# rotations before the first: the ramp ends at the head dim (not at half of it), and begins at 0.
# With theta 10, the pair with one rotation in 1,024 tokens is beyond the head dim.
LONG = YARN | {"original_max_position_embeddings": 131072}
SHORT = YARN | {"original_max_position_embeddings": 128}
WIDE = YARN | {"original_max_position_embeddings": 1024}
FACTORS = list(np.linspace(1, 8, 32))
KINDS = [{"kind": "default"}, {"kind": "linear", "factor": 4.0}, LLAMA3, YARN, LONG, SHORT]


def frequencies_of(head_dim, theta, scaling):
    """Frequencies and amplitude, pair by pair, from the papers and model cards."""
    kind = scaling["kind"]
    frequencies = []
    for i in range(head_dim // 2):
        f = theta ** (-2 * i / head_dim) / scaling.get("factors", np.ones(head_dim // 2))[i]
        if kind == "linear":
            f /= scaling["factor"]
        elif kind == "llama3":
            wavelength, context = 2 * math.pi / f, scaling["original_max_position_embeddings"]
            if wavelength > context / scaling["low_freq_factor"]:
                f /= scaling["factor"]
            elif wavelength > context / scaling["high_freq_factor"]:
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                smooth = (context / wavelength - low) / (high - low)
                f = (1 - smooth) * f / scaling["factor"] + smooth * f
        elif kind == "yarn":
            context = scaling["original_max_position_embeddings"]
            low, high = (
                head_dim * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(theta))
                for rotations in (scaling["beta_fast"], scaling["beta_slow"])
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
            stretched = min(max((i - low) / (high - low), 0), 1)
            f = f / scaling["factor"] * stretched + f * (1 - stretched)
        frequencies.append(f)
    amplitude = 0.1 * math.log(scaling["factor"]) + 1 if kind == "yarn" else 1.0
    return np.array(frequencies), amplitude


CASES = [(*sizes, kind) for sizes in ((64, 1e4), (128, 5e5)) for kind in KINDS]


@pytest.mark.parametrize("head_dim, theta, scaling", [*CASES, (64, 10.0, WIDE)])
def test_every_kind_equals_its_formula(rng, scaling, head_dim, theta):
    frequencies, amplitude = frequencies_of(head_dim, theta, scaling)
    x = rng.normal(size=(1, 40, 2, head_dim)).astype(np.float32)
    positions = np.sort(rng.choice(4096, 40, replace=False))[None].astype(np.uint32)
    actual = rotary(head_dim, theta, scaling).rotate(jnp.asarray(x), jnp.asarray(positions))
    angles = positions[0][:, None, None] * frequencies
    first, second = np.split(x[0].astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angles) * amplitude, np.sin(angles) * amplitude
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    # Frequencies are rounded to 2^-32 rotations: an angle error of at most 3e-6 at position 4,096.
    np.testing.assert_allclose(actual[0], expected, atol=2e-5)


@pytest.mark.parametrize("scaling", KINDS)
def test_factors_divide_the_frequencies_under_every_kind(rng, scaling):
    scaling = scaling | {"factors": FACTORS}
    x = jnp.asarray(rng.normal(size=(1, 1, 1, 64)), jnp.float32)
    actual = rotary(64, 1e4, scaling).rotate(x, jnp.full((1, 1), 700, jnp.uint32))
    expected = oracle.rotate(np.float64(x[0, :, 0]), [700], frequencies_of(64, 1e4, scaling))
    np.testing.assert_allclose(actual[0, :, 0], expected, atol=2e-5)


def test_frequencies_are_rounded_to_32_bits():
    scheme = rotary(8, 100.0)
    expected = [round(100.0 ** (-i / 4) / (2 * math.pi) * 2**32) for i in range(4)]
    assert scheme == Rotary(tuple(expected)) and hash(scheme) == hash(rotary(8, 100.0))


def worst_logit(rotate, position, distance=250, head_dim=64, vectors=200):
    """The largest error of q.k / sqrt(H) for a query at `position`, against float64 angles."""
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(1, vectors, 1, head_dim)).astype(np.float32) for _ in range(2))
    q_at = np.full((1, vectors), position % 2**32, np.uint32)
    k_at = np.full((1, vectors), (position - distance) % 2**32, np.uint32)
    rotated = [np.asarray(rotate(x, p), np.float64) for x, p in ((q, q_at), (k, k_at))]
    actual = (rotated[0] * rotated[1]).sum(axis=-1)[0, :, 0]
    relative = np.full(vectors, distance)
    expected = (oracle.rotate(q[0, :, 0].astype(np.float64), relative, 1e4) * k[0, :, 0]).sum(-1)
    return np.abs(actual - expected).max() / math.sqrt(head_dim)


@jax.jit
def exact(x, positions):
    return rotary(64, 1e4).rotate(x, positions)


def float_angles(x, positions):
    """As in other libraries: position times frequency in float32."""
    frequencies = np.float32(1e4) ** (-np.arange(32, dtype=np.float32) / np.float32(32))
    angles = (positions.astype(np.float32)[..., None] * frequencies)[:, :, None]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("position", [250, 4096, 4_000_000, 2**31 + 17, 2**32 - 10, 2**32 + 100])
def test_logits_are_exact_at_any_position(position):
    assert worst_logit(exact, position) <= 2e-6
    if position in (4_000_000, 2**32 - 10):
        assert worst_logit(float_angles, position) > 0.01


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_rerotate_equals_one_rotation(scaling, rng):
    """The amplitude is applied once."""
    scheme = rotary(16, 1e4, scaling)
    x = jnp.asarray(rng.normal(size=(2, 5, 3, 16)), jnp.float32)
    positions, by = jnp.asarray(rng.integers(0, 2**32, (2, 2, 5)), jnp.uint32)
    again = scheme.rerotate(scheme.rotate(x, positions), by)
    np.testing.assert_allclose(again, scheme.rotate(x, positions + by), atol=3e-6)


def test_rotation_keeps_the_dtype(rng):
    x = jnp.asarray(rng.normal(size=(1, 3, 2, 8)), jnp.bfloat16)
    positions = jnp.arange(3, dtype=jnp.uint32)[None]
    rotated = rotary(8, 1e4).rotate(x, positions)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated[:, 0], x[:, 0])  # position 0 rotates nothing


def test_alibi_slopes():
    assert Alibi.of(8).slopes == tuple(2.0**-i for i in range(1, 9))
    later_slopes = (2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5)
    np.testing.assert_allclose(Alibi.of(12).slopes, Alibi.of(8).slopes + later_slopes)
    assert Alibi.of(2, max_bias=16).slopes == (2.0**-8, 2.0**-16)


def test_alibi_falls_with_distance_across_the_wrap():
    queries = jnp.asarray([[1]], jnp.uint32)
    keys = jnp.asarray([[2**32 - 2, 0, 1]], jnp.uint32)
    bias = np.asarray(Alibi.of(4).bias(queries, keys, 2))
    assert bias.shape == (1, 2, 2, 1, 3)
    slopes = np.array([2.0 ** (-2 * i) for i in range(1, 5)]).reshape(2, 2, 1, 1)
    np.testing.assert_allclose(bias[0], -slopes * np.array([3, 1, 0]))


def test_bad_arguments_are_refused():
    for scaling, message in (
        ({"kind": "dynamic"}, "one of default"),
        ({"kind": "linear"}, "needs"),
    ):
        with pytest.raises(UserError, match=message):
            rotary(8, 1e4, scaling)
    with pytest.raises(UserError, match="even head dim, got 7"):
        rotary(7, 1e4)
    with pytest.raises(UserError, match=r"theta above 0 and finite, got -1\.0"):
        rotary(8, -1.0)
    with pytest.raises(UserError, match="4 pairs needs head dim 8, got 6"):
        rotary(8, 1e4).rotate(jnp.zeros((1, 1, 1, 6)), jnp.zeros((1, 1), jnp.uint32))
    with pytest.raises(UserError, match="got 5 slopes for 2 KV heads"):
        Alibi((1.0,) * 5).bias(jnp.zeros((1, 1), jnp.uint32), jnp.zeros((1, 1), jnp.uint32), 2)


def test_a_part_of_the_dims_is_rotated():
    """The first dims as in an encoding of their own; the others keep their values."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 16)), jnp.float32)
    positions = jnp.arange(5, dtype=jnp.uint32)[None]
    turned = rotary(16, 100.0, rotated=6).rotate(x, positions)
    alone = rotary(6, 100.0).rotate(x[..., :6], positions)
    np.testing.assert_array_equal(turned, jnp.concatenate([alone, x[..., 6:]], axis=-1))
    assert rotary(16, 100.0, rotated=16) == rotary(16, 100.0)
    for wrong in (0, 5, 18):
        with pytest.raises(UserError, match=r"rotated|even"):
            rotary(16, 100.0, rotated=wrong)
