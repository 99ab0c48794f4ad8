"""Profile of the compiled decode loop: the cost of each of its parts."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Spec
from jaxkv.driver import step
from jaxkv.evals.lib.hlo import copies_in_loops
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.timing import Variant, bar, decode_variant, prompt, ratio, time_rounds, timed
from jaxkv.models.generation import streams as streams_module
from jaxkv.models.generation.decoding import BLOCK
from jaxkv.models.loading.llm import Llm
from jaxkv.policies import Streaming
from jaxkv.rotary import rotary

POLICY = "streaming:sinks=4,window=252"
FAR = 4_000_123


def run(llm: Llm, count: int) -> dict[str, Any]:
    """Stories260K with a ring of 256 slots that has wrapped: the overhead of the loop dominates."""
    tokens, plain = 4 * BLOCK, PLAIN
    streams = {
        "loop": started(models.Stream(llm, POLICY)),
        "without nnx": started(plain.Stream(llm, POLICY)),
        "absolute": started(models.Stream(llm, f"{POLICY},positions=absolute")),
    }
    variants = {name: decode_variant(stream, tokens) for name, stream in streams.items()}
    variants["step by step"] = by_step(started(models.Stream(llm, POLICY)), tokens)
    seconds = time_rounds(variants, count, "loop")
    gain = ratio(seconds["step by step"], seconds["loop"])
    nnx = ratio(seconds["without nnx"], seconds["loop"])
    sinks = ratio(seconds["absolute"], seconds["loop"])
    stream = streams["loop"]
    program = lowered(streams_module, stream)
    sizes = {leaf.size for leaf in jax.tree.leaves(stream.decoding.states) if leaf.ndim == 4}
    copies = copies_in_loops(program.compile().as_text(), sizes)
    errors = {name: far_error(chunk) for name, chunk in (("decode", 1), ("chunks", 64))}
    return {
        "microseconds_per_token": {
            name: spread(1e6 / tokens * np.array(s)) for name, s in seconds.items()
        },
        "cache_copies": copies,
        # If both programs are equal, the ratio of their times shows the noise of the machine.
        "same_program_without_nnx": program.as_text()
        == lowered(plain, streams["without nnx"]).as_text(),
        "error_at": FAR,
        "error": errors,
        "bars": [
            bar("260K: while_loop over a Python loop of its step", gain, ">=", 1.8),
            bar("260K: nnx over plain pytrees", nnx, ">=", 0.95),
            bar("260K: wrapped ring over one without sink correction", sinks, ">=", 0.85),
            bar("copies of the cache in the loop body", len(copies), "<=", 0),
            bar(f"attention error at position {FAR:,}", max(errors.values()), "<=", 2e-6),
        ],
    }


def started(stream: Any) -> Any:
    """The stream, advanced until its ring has wrapped."""
    stream.prefill([prompt(stream.llm, 300)])
    return stream


def by_step(stream: models.Stream, tokens: int) -> Variant:
    """The same step, called from Python for each token."""

    def run() -> None:
        for _ in range(tokens):
            stream.decode(models.Sampling(), 1, ())

    return timed(run)


def plain_streams() -> ModuleType:
    """generation/streams.py with a decoder of plain arrays: the same three modules without nnx."""
    arrays = SimpleNamespace(Module=object, Param=lambda a: a, data=list)
    with mock.patch.dict(sys.modules, {"flax": SimpleNamespace(nnx=arrays)}):
        decoder = second_copy("jaxkv.models.network.decoder")
    with mock.patch.dict(sys.modules, {"jaxkv.models.network.decoder": decoder}):
        decoding = second_copy("jaxkv.models.generation.decoding")
    with mock.patch.dict(sys.modules, {"jaxkv.models.generation.decoding": decoding}):
        return second_copy("jaxkv.models.generation.streams")


def second_copy(name: str) -> ModuleType:
    """An independent second copy of a module."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = plain_streams()  # at import, so that edits during a long run have no effect


def lowered(module: ModuleType, stream: models.Stream) -> jax.stages.Lowered:
    """One call of `decode` as XLA receives it; its text names no source file."""
    sampling = models.Sampling()
    decode_block = module.compiled_decode_block()
    return decode_block.lower(stream.static, sampling.filters, (), stream.llm.weights,
                              stream.decoding, sampling.knobs, np.int32(1))  # fmt: skip


def far_error(chunk: int) -> float:
    """Error of a ring's attention at position 4,000,123 against float64 with cache-relative
    positions."""
    policy, heads, dim, ring_tokens = Streaming(4, 252), 4, 64, 300
    encoding = rotary(dim, 10_000.0)
    spec = Spec(kv_heads=heads, head_dim=dim, scale=dim**-0.5, encoding=encoding)
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, policy.sinks + ring_tokens, heads, dim)).astype(np.float32)
    positions = np.r_[np.arange(policy.sinks), np.arange(FAR - ring_tokens + 1, FAR + 1)].astype(
        np.uint32
    )
    state = policy.init(spec, 1, jax.random.key(0))
    run_step = jax.jit(step, static_argnums=(0, 1))
    for at in [0, *range(policy.sinks, len(q), chunk)]:
        part = slice(at, policy.sinks if at == 0 else at + chunk)
        batched = lambda a, part=part: jnp.asarray(a[None, part])  # noqa: E731
        valid = jnp.ones_like(batched(positions), bool)
        out, state = run_step(
            policy, spec, state, batched(q), batched(k), batched(v), batched(positions), valid
        )
    cached = np.r_[np.arange(policy.sinks), np.arange(len(q) - policy.window, len(q))]
    exact = attention(q[-1], k[cached], v[cached])
    return float(np.abs(np.asarray(out[0, -1], np.float64) - exact).max())


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of one query in float64; the query has the last cache-relative position."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    half = q.shape[-1] // 2
    frequency = 10_000.0 ** (-np.arange(half) / half)

    def rotate(x: np.ndarray, position: np.ndarray) -> np.ndarray:
        angle = position[:, None, None] * frequency
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    position = np.arange(len(k))
    q = rotate(q[None], position[-1:])[0]
    logits = np.einsum("nh,snh->ns", q, rotate(k, position)) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.einsum("ns,snh->nh", weights / weights.sum(1, keepdims=True), v)
