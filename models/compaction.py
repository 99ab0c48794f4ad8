"""Learned memory: a document as a few trained keys and values per layer (beyond the papers).

A policy that drops tokens of a prompt keeps some of its keys and values. Here P pairs per layer and
KV head are free numbers. They are trained so that the frozen model predicts with them what it
predicts with full attention to the document. The loss is KL(full || pairs) on two kinds of text:
spans of the document, which the model is led to repeat, and text that the model itself writes after
the document. So the pairs depend on no question that is asked later.

The pairs start as the P tokens per head that SnapKV keeps. They are first tokens of the cache, at
positions 0 to P - 1, and the text that follows begins at position P. A start key is rotated so that
it is as far from that text as its token was: before training the pairs equal SnapKV's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkv.contract import Policy, Spec, State
from jaxkv.errors import UserError, check_int
from jaxkv.models.config import Config
from jaxkv.models.decoder import SINK_KEYS, SINK_VALUES, Decoder, Weights
from jaxkv.models.decoding import put_in_front_of_layer
from jaxkv.models.divergence import divergence
from jaxkv.models.llm import Llm
from jaxkv.models.streams import Stream
from jaxkv.policies import Full, SnapKV
from jaxkv.policies.prompt_compression.base import CompressedState
from jaxkv.sampling import Sampling
from jaxkv.typing import Array, Float, Float32, Int32, UInt32

SPAN = 64  # tokens of a training text
WRITTEN = 32  # texts that the model writes
OVERLAP = 1  # spans that contain each token of the document
WINDOW = 16  # last tokens that SnapKV keeps, at most
LAST_RATE = 0.05  # the final learning rate, as a share of the first
# Beginnings of training texts: the first of spans, each of some texts that the model writes.
LEADS = ("\n\n", "\n", "\n\nQuestion:", "\n\nIn this text,")


class Pairs(NamedTuple):
    """Keys before rotation, and values."""

    keys: Float32[Array, "L K P H"]
    values: Float32[Array, "L K P H"]

    @property
    def weights(self) -> dict[str, Array]:
        """The pairs as weights of a model (`Llm.weights`)."""
        return {SINK_KEYS: self.keys, SINK_VALUES: self.values}


class Document(NamedTuple):
    """A document that was read: its length, the full caches, and what SnapKV keeps of them."""

    length: int
    policies: tuple[Full, ...]
    states: tuple[State, ...]
    compressed: tuple[CompressedState, ...]


def check(llm: Llm, document: Sequence[int], slots: int) -> None:
    """Raise UserError where a document has no more tokens than slots, or a model cannot train."""
    check_int("slots", slots, 2)
    if len(document) <= slots:
        raise UserError(
            f"the document must have more tokens than slots, got {len(document)} and {slots}; "
            "give a longer text or fewer slots"
        )
    if len(document) + 2 * SPAN > llm.config.context:
        raise UserError(
            f"the document must have at most {llm.config.context - 2 * SPAN} tokens, which the "
            f"model's context takes with {2 * SPAN} more, got {len(document)}; give a shorter text"
        )
    if any(llm.config.windows) or llm.weight_format or llm.sink_pairs:
        raise UserError(
            "learned memory needs float weights, full attention in every layer and no other "
            "learned pairs; take another model, and leave out --weights and --sinks"
        )


def compact(
    llm: Llm,
    document: Sequence[int],
    slots: int = 64,
    steps: int = 300,
    batch: int = 4,
    lr: float = 5e-3,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Pairs | None:
    """Train `slots` pairs per layer and KV head for a document; None if `stopped` says so.

    progress: called with the number of finished steps and the loss of the last one, in nats.
    Raises UserError as `check` does, and for a loss that is not finite.
    """
    check(llm, document, slots)
    for name, value in (("steps", steps), ("batch", batch)):
        check_int(name, value)
    cached = read(llm, document, slots)
    texts = training_texts(llm, document, cached, seed)
    batches = (texts[at : at + batch] for at in range(0, len(texts), batch))
    hidden = [follow_full(llm, cached, batch_texts) for batch_texts in batches]
    targets = jnp.concatenate(hidden, axis=1)
    pairs = pairs_of(llm, cached, slots)
    moments, rng = optimizer(lr, steps).init(pairs), np.random.default_rng(seed)
    for step in range(steps):
        if stopped():
            return None
        chosen = rng.choice(len(texts), min(batch, len(texts)), replace=False)
        arguments = llm.weights, pairs, moments, texts[chosen], targets[:, chosen]
        pairs, moments, loss = update(llm.config, llm.spec, (lr, steps), *arguments)
        if not np.isfinite(loss):
            raise UserError(f"step {step + 1} has a loss that is not finite at the rate {lr:g}; "
                            "give a lower one")  # fmt: skip
        if progress is not None:
            progress(step + 1, float(loss))
    return pairs


def read(llm: Llm, document: Sequence[int], slots: int) -> Document:
    """Read a document once: until the end of prefill SnapKV caches all tokens."""
    size = len(document) + 2 * SPAN
    stream = Stream(llm, SnapKV(slots, min(WINDOW, slots // 2), start=size), tokens=size)
    stream.prefill([document])
    full = tuple(state.dense for state in stream.decoding.states)
    stream.finish_prefill()
    policies = (Full(start=size),) * len(full)
    return Document(len(document), policies, full, stream.decoding.states)


def training_texts(
    llm: Llm, document: Sequence[int], cached: Document, seed: int
) -> Int32[np.ndarray, "M T"]:
    """Spans of the document, evenly spaced, and texts that the model writes after it."""
    leads = [llm.tokenizer.encode(lead, bos=False) for lead in LEADS]
    width = min(SPAN, len(document))
    size = width - len(leads[0])
    starts = np.linspace(0, len(document) - size, -(-OVERLAP * len(document) // size)).astype(int)
    spans = [[*leads[0], *document[start : start + size]] for start in starts]
    stream = Stream(llm, cached.policies, WRITTEN, [seed + i for i in range(WRITTEN)])
    stream.lengths = np.full(WRITTEN, cached.length)
    stream.decoding = stream.decoding._replace(
        states=repeat(cached.states, WRITTEN),
        position=jnp.full((WRITTEN,), cached.length, jnp.uint32),
    )
    prompts = [leads[i % len(leads)] for i in range(WRITTEN)]
    stream.prefill(prompts)
    out, _ = stream.decode(Sampling(temperature=1.0), SPAN, ())
    written = [[*lead, *row] for lead, row in zip(prompts, out.tolist(), strict=True)]
    return np.array([text[:width] for text in spans + written], np.int32)


def pairs_of(llm: Llm, cached: Document, slots: int) -> Pairs:
    """SnapKV's cache, with keys as they are before they are rotated to positions 0 to P - 1."""
    window = min(WINDOW, slots // 2)
    joined = [
        [jnp.concatenate([a[0, :, : slots - window], b[0, :, :window]], axis=1)
         for a, b in zip(layer.sample[:2], layer.dense[:2], strict=True)]
        for layer in cached.compressed
    ]  # fmt: skip
    keys, values = (jnp.stack(arrays).astype(jnp.float32) for arrays in zip(*joined, strict=True))
    # From the token's position to one that is as far from `slots` as it was from the next token.
    by = np.arange(slots - cached.length, -cached.length, -1).astype(np.uint32)
    heads = keys.reshape(-1, slots, 1, keys.shape[-1])
    keys = llm.spec.encoding.rerotate(heads, jnp.asarray(by)[None]).reshape(keys.shape)
    # A cached key has YaRN's factor, which it gets again when the pair is put into a cache.
    return Pairs(keys / np.float32(getattr(llm.spec.encoding, "amplitude", 1.0)), values)


def repeat(states: tuple[State, ...], batch: int) -> tuple[State, ...]:
    """The states of one sequence for `batch` sequences."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, batch, axis=0), states)


def follow(
    config: Config,
    policies: tuple[Policy, ...],
    weights: Weights,
    states: tuple[State, ...],
    position: UInt32[Array, ""],
    texts: Int32[Array, "B T"],
) -> tuple[Decoder, Float[Array, "D B T"]]:
    """The decoder, and its last hidden states for texts that follow one cached sequence."""
    decoder = Decoder(config, weights)
    positions = position + jnp.arange(texts.shape[1], dtype=jnp.uint32)[None]
    positions = jnp.broadcast_to(positions, texts.shape)
    states, valid = repeat(states, len(texts)), jnp.ones(texts.shape, bool)
    return decoder, decoder(texts, positions, valid, policies, states)[0]


def follow_full(llm: Llm, cached: Document, texts: Int32[np.ndarray, "B T"]) -> Array:
    """The last hidden states [D,B,T] for texts that follow the whole document."""
    return _followed(llm.config, cached.policies, llm.weights, cached.states,
                     jnp.uint32(cached.length), texts)  # fmt: skip


@partial(jax.jit, static_argnums=(0, 1))
def _followed(
    config: Config, policies: tuple[Policy, ...], *arguments: object
) -> Float[Array, "D B T"]:
    return follow(config, policies, *arguments)[1]


def optimizer(lr: float, steps: int) -> optax.GradientTransformation:
    """Adam with a clipped gradient and a cosine schedule."""
    rate = optax.cosine_decay_schedule(lr, steps, LAST_RATE)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


@partial(jax.jit, static_argnums=(0, 1, 2))
def update(
    config: Config,
    spec: Spec,
    rates: tuple[float, int],
    weights: Weights,
    pairs: Pairs,
    moments: optax.OptState,
    texts: Int32[Array, "B T"],
    targets: Float[Array, "D B T"],
) -> tuple[Pairs, optax.OptState, Float32[Array, ""]]:
    """One step of Adam on the pairs alone; rates: the arguments of `optimizer`."""
    loss, gradient = jax.value_and_grad(
        lambda trained: divergence_of(config, spec, weights, trained, texts, targets)
    )(pairs)
    changes, moments = optimizer(*rates).update(gradient, moments)
    return optax.apply_updates(pairs, changes), moments, loss


def divergence_of(
    config: Config, spec: Spec, weights: Weights, pairs: Pairs, texts: Array, targets: Array
) -> Float32[Array, ""]:
    """KL(full || pairs) of the next token, in nats, averaged over all tokens of the texts."""
    count = pairs.keys.shape[2]
    policy, start = Full(start=count + texts.shape[1]), jnp.zeros(1, jnp.uint32)
    empty = policy.init(spec, 1, jax.random.key(0))  # draws nothing
    states = tuple(
        put_in_front_of_layer(policy, spec, None, empty, k, v, start)
        for k, v in zip(*pairs, strict=True)
    )
    decoder, hidden = follow(
        config, (policy,) * config.layers, weights, states, jnp.uint32(count), texts
    )
    full = jax.lax.stop_gradient(decoder.logits(targets))
    return jnp.mean(divergence(full, decoder.logits(hidden))[0])
