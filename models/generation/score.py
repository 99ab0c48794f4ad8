"""The loss of every token of a text under a cache policy, computed chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import defaults
from jaxkv.contract import Policy
from jaxkv.errors import UserError, check_int
from jaxkv.models.generation.decoding import Static, positions_of, run_layers
from jaxkv.models.generation.streams import Stream, bucket, not_finite
from jaxkv.models.generation.text import warn_beyond_context
from jaxkv.models.loading.compilation import clock
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.cross_entropy import target_losses
from jaxkv.models.network.decoder import Decoder, Weights
from jaxkv.policy_spec import format_policy
from jaxkv.typing import Array, Bool, Float, Float32, Int32

# Tokens whose logits are in memory at a time: a vocabulary is often wider than a hidden state.
TOKENS_OF_LOGITS = 256


def losses(
    llm: Llm,
    tokens: Sequence[int],
    policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
    chunk: int | None = None,
    start: int = 0,
    stream: Stream | None = None,
    prompt: int = 0,
) -> Iterator[np.ndarray]:
    """Yield the natural-log losses of tokens prompt+1..N-1 of one text, one array per chunk.

    The loss of a sink token that no head predicts (models/loading/sinks.py) is NaN.
    tokens: the text with its BOS in front. chunk: tokens per chunk; None chooses by policy. Its
    effect is that of `Stream.prefill`. start: the position of the first token, up to 2^32 - 1.
    stream: continue these states, at their position, instead of fresh ones. prompt: the number of
    first tokens that are the prompt, after which prefill is finished. The loss of the first token
    after it is left out, because policies that act on a prompt predict it by full attention.
    Raises UserError for unknown ids, where there is nothing to predict, and without a prompt for a
    policy that compresses or indexes it.
    """
    ids = llm.checked_ids(tokens)
    check_int("prompt", prompt, 0)
    if len(ids) < prompt + 2:
        after = f" after a prompt of {prompt}" if prompt else ""
        raise UserError(
            f"a loss needs at least 2 tokens{after}, got {max(0, len(ids) - prompt)}; give a "
            f"longer text{' or a shorter prompt' if prompt else ''}"
        )
    if stream is None:
        stream = Stream(llm, policy, tokens=len(ids), start=start)
    elif start:
        raise UserError(f"a stream has its own position: start must be left out, got {start}")
    if not stream.prefill_finished:
        check_scorable(stream.policies, prompt)
    return _losses_after(llm, stream, ids, prompt, stream.chunk_of(chunk))


def check_scorable(policies: Sequence[Policy], prompt: int = 0) -> None:
    """Raise UserError for a policy that acts on a prompt where there is none, or too short a one.

    policies: one per layer; one layer at least must act. prompt: the number of its tokens.
    """
    acting = [policy for policy in policies if policy.min_prompt is not None]
    if acting and prompt < max(1, min(policy.min_prompt for policy in acting)):
        needed = max(1, min(policy.min_prompt for policy in acting))
        raise UserError(
            f"{format_policy(policies)} acts at the end of a prompt of at least {needed} tokens, "
            f"got {prompt}; give --prompt-tokens (in Python: prompt=), or smaller fields"
        )


def _losses_after(
    llm: Llm, stream: Stream, ids: Int32[np.ndarray, " N"], prompt: int, chunk: int
) -> Iterator[Float[np.ndarray, " T"]]:
    """The losses of the tokens after the first one that follows the prompt."""
    if prompt:
        stream.prefill([ids[:prompt].tolist()], chunk)
        stream.finish_prefill()
    for x, targets, size in hidden_by_chunk(llm, stream, ids[prompt:], chunk):
        compared = compare_chunk(stream.static.of_model, llm.weights, x, targets)
        yield np.asarray(compared)[:size, 0]


@partial(jax.jit, static_argnums=0)
def compare_chunk(
    static: Static,
    weights: Weights,
    x: Float[Array, "1 T D"],
    targets: Int32[Array, "1 T"],
    full: Float[Array, "1 T D"] | None = None,
) -> Float32[Array, "T 3"]:
    """Losses of the targets, KL from full attention and agreement (NaN where `full` is None).

    x, full: the outputs of the last layer under a policy and under full attention.
    """
    decoder, parts = Decoder(static.config, weights, static.mesh), []
    for start in range(0, x.shape[1], TOKENS_OF_LOGITS):
        block = slice(start, start + TOKENS_OF_LOGITS)
        logits = decoder.logits(decoder.normed(x[:, block]))
        losses = target_losses(logits, targets[:, block])
        if full is None:
            kl, agreement = jnp.full_like(losses, jnp.nan), jnp.full_like(losses, jnp.nan)
        else:
            of_full = decoder.logits(decoder.normed(full[:, block].astype(x.dtype)))
            kl, agreement = divergence(of_full, logits)
        parts.append(jnp.stack([losses[0], kl[0], agreement[0].astype(jnp.float32)], axis=1))
    return jnp.concatenate(parts)


def divergence(
    full: Float32[Array, "B T V"], policy_logits: Float32[Array, "B T V"]
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """KL(full || other) of the next token in nats, and whether the likeliest token is the same.

    full, policy_logits: logits under full attention and under a policy, of the same tokens.
    """
    p, q = jax.nn.log_softmax(full, axis=-1), jax.nn.log_softmax(policy_logits, axis=-1)
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    return kl, jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)


def hidden_by_chunk(
    llm: Llm, stream: Stream, ids: Int32[np.ndarray, " N"], chunk: int
) -> Iterator[tuple[Float[Array, "1 T D"], Int32[np.ndarray, "1 T"], int]]:
    """Feed all tokens but the last; by chunk, the output of the last layer and the next tokens.

    Chunks are padded at their end; the third item is the number of tokens that are not padding.
    """
    for begin in range(0, len(ids) - 1, chunk):
        size = min(chunk, len(ids) - 1 - begin)
        width = bucket(size, chunk)
        fed = np.zeros((2, 1, width), np.int32)
        fed[0, 0, :size] = ids[begin : begin + size]
        fed[1, 0, :size] = ids[begin + 1 : begin + 1 + size]
        stream.reserve(size)
        position, valid = stream.decoding.position, np.arange(width)[None, :] < size
        positions = positions_of(position, valid)
        x, states = run_layers(
            stream.static, llm.weights, fed[0], positions, valid, stream.decoding.states
        )
        position = position + np.uint32(size)
        stream.decoding = stream.decoding._replace(states=states, position=position)
        yield x, fed[1], size


def encode(llm: Llm, text: str) -> list[int]:
    """The token ids of a text to score, with one BOS in front where the tokenizer has one."""
    return llm.tokenizer.encode(text, bos=True)


@dataclass(frozen=True, eq=False)
class Score:
    """What a policy gives on stretches of a text.

    by_stretch: losses of tokens prompt+1, prompt+2, ... of each stretch, NaN for sink tokens, which
    no head predicts. state_bytes: bytes of the caches after the last token. seconds: time without
    compile_seconds; a prompt that several policies share counts for the first of them. chunk:
    tokens per chunk, None without a cache. kl: KL of the prediction from that of full attention.
    agreement: 1 where both have the same likeliest token. Both are None or NaN where they are not
    measured. milliseconds: time per decoded token in each round; empty where it is not measured.
    An interrupted policy has fewer stretches, or one with fewer tokens.
    """

    policy: str | Policy | Sequence[Policy | str]
    by_stretch: Float[np.ndarray, "S C"]
    state_bytes: int
    seconds: float
    compile_seconds: float
    chunk: int | None = None
    prompt: int = 0
    kl: Float[np.ndarray, "S C"] | None = None
    agreement: Float[np.ndarray, "S C"] | None = None
    milliseconds: tuple[float, ...] = ()

    @property
    def losses(self) -> Float[np.ndarray, " N"]:
        """Means over stretches, without the tokens that are a sink token in any of them."""
        predicted = np.isfinite(self.by_stretch).all(axis=0)
        return np.mean(self.by_stretch[:, predicted], axis=0)

    @property
    def predictions(self) -> int:
        return int(np.isfinite(self.by_stretch).sum())

    @property
    def loss(self) -> float:
        """The mean loss, in nats per token."""
        return float(np.mean(self.losses, dtype=np.float64))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))

    def blocks(self, size: int) -> list[dict[str, int | float]]:
        """The mean loss of each `size` consecutive predictions, of tokens start to end - 1."""
        check_int("size", size)
        losses, before = self.losses, self.prompt + 1
        total = len(losses)
        return [
            {
                "start": first + before,
                "end": min(first + size, total) + before,
                "loss": float(np.mean(losses[first : first + size], dtype=np.float64)),
            }
            for first in range(0, total, size)
        ]


def score(
    llm: Llm,
    tokens: Sequence[int],
    policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
    chunk: int | None = None,
    seed: int = 0,
    prompt: int = 0,
) -> Score:
    """The losses of a text under a policy.

    seed: of policies that draw. prompt: as for `losses`.
    """
    ids = llm.checked_ids(tokens)
    stream = Stream(llm, policy, seed=seed, tokens=len(ids))
    chunk = stream.chunk_of(chunk)
    # This raises before the warning.
    parts = losses(llm, ids, chunk=chunk, stream=stream, prompt=prompt)
    warn_beyond_context(llm, stream.policies, len(ids))
    text_losses, seconds, compiling = gather(parts)
    targets = ids[prompt + 1 :][: len(text_losses)]
    if not np.isfinite(text_losses[targets < llm.config.vocab]).all():
        raise not_finite(llm)
    by_stretch = text_losses[None]
    return Score(policy, by_stretch, stream.state_bytes, seconds, compiling, chunk, prompt)


def gather(
    parts: Iterable[np.ndarray],
    progress: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> tuple[np.ndarray, float, float]:
    """Concatenate the parts; returns the result and the seconds of computing and of compiling.

    progress: called with the elements so far. stopped: asked after each part whether to end there.
    """
    start, compiled, gathered, done = time.perf_counter(), clock().seconds, [], 0
    for part in parts:
        gathered.append(part)
        done += len(part)
        if progress:
            progress(done)
        if stopped and stopped():
            break
    compiled = clock().seconds - compiled
    seconds = max(0.0, time.perf_counter() - start - compiled)
    return np.concatenate(gathered), seconds, compiled
