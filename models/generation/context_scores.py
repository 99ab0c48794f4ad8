"""KVzip's scores: how much attention each key gets while the model repeats its context.

The model reads a context once, and then again in pieces, each after a request to repeat it. What it
attends to while it repeats, a later question may ask for (KVzip, arXiv 2505.23416, section 3). The
wording, the pieces of 2,048 tokens and the eight tokens that announce a piece are those of kvpress.
So is the softmax: over the sinks, the piece and its repetition. The authors' code has pieces of
2,000 tokens, keeps every token of the system prompt, and has all of them in the softmax. Layer by
layer, so that one layer at a time has its cache in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, Spec, State
from jaxkv.errors import UserError, check_int
from jaxkv.models.generation.decoding import Static, embed
from jaxkv.models.generation.shared_prompt import CHUNK, AttentionInputs, join, run_recorded
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Weights, layer_weights, rms_norm, sink_logits
from jaxkv.policies import Full
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

PIECE = 2048  # tokens that are repeated at once
SINKS = 4
ALIGNED = 64  # parts have a multiple of so many tokens, so that few programs are compiled
ANNOUNCED = 8  # last tokens of the piece before, with which a repetition is announced
REQUEST = "\n\nRepeat the previous context exactly."
NEXT_REQUEST = "\n\nRepeat the part of the previous context exactly, starting with"
MARK = "\ue000context\ue001"  # private-use characters, which templates copy unchanged


class TokenParts(NamedTuple):
    """Tokens that are read together, in parts of one size; the last part is padded.

    ids, positions, valid: of each part. x: the input of the next layer.
    """

    ids: list[Int32[np.ndarray, "1 T"]]
    x: list[Float[Array, "1 T D"]]
    positions: list[UInt32[np.ndarray, "1 T"]]
    valid: list[Bool[np.ndarray, "1 T"]]


def around_context(llm: Llm) -> tuple[list[int], list[int]]:
    """The ids in front of a context, and those between a request and the answer.

    They are those of the chat template around a message; without one, the BOS, and a line break.
    """
    encode = llm.tokenizer.encode
    if llm.chat.template is None:
        return encode("", bos=True), encode("\n", bos=False, start=False)
    before, after = around_message(llm)
    front = [*llm.tokenizer.sinks, *encode(before, bos=False)]
    return front, encode(after, bos=False, start=False)


def around_message(llm: Llm) -> tuple[str, str]:
    """What the chat template writes before and after the only message of a user.

    Raises UserError for a template that does not show the message once, as it is.
    """
    parts: list[str] = llm.chat.render([{"role": "user", "content": MARK}]).split(MARK)
    if len(parts) != 2:
        raise UserError(
            f"the chat template of {llm.name} must show a message once, got {len(parts) - 1} "
            "times; use another model"
        )
    return parts[0], parts[1]


def repeatable_tokens(llm: Llm, max_tokens: int) -> int:
    """The most tokens that the trained context has room for twice, from 1 to `max_tokens`.

    Beside them it has the chat template and the request to repeat them.
    """
    front, answer = around_context(llm)
    request = llm.tokenizer.encode(REQUEST, bos=False, start=False)
    room = llm.config.context - len(front) - len(request) - len(answer)
    return max(1, min(max_tokens, room // 2))


def repetitions(llm: Llm, ids: Sequence[int], front: int) -> list[tuple[slice, list[int]]]:
    """Each piece of a context, and the tokens with which it is repeated.

    ids: the context. front: its first tokens, which are not repeated.
    """
    encode = partial(llm.tokenizer.encode, bos=False, start=False)
    _, answer = around_context(llm)
    pieces = []
    for start in range(front, len(ids), PIECE):
        piece = slice(start, min(start + PIECE, len(ids)))
        request = encode(REQUEST)
        if start > front:
            request = encode(NEXT_REQUEST) + list(ids[start - ANNOUNCED : start])
        pieces.append((piece, [*request, *answer, *ids[piece]]))
    return pieces


def context_scores(
    llm: Llm,
    ids: Sequence[int],
    front: int,
    progress: Callable[[int, int], None] | None = None,
) -> Float32[np.ndarray, "L K S"]:
    """The score of each key of a context: its largest attention from the repetition, from 0 to 1.

    ids: the context with what the chat template writes in front of it. front: the number of those
    tokens, which are not repeated and have the score 0. progress: called with (tokens done, all
    tokens) over all layers.

    Raises UserError for unknown ids, for a context of which nothing is repeated, for one that
    leaves no room for its repetition, and for a model with sliding windows.
    """
    return np.stack([scores for _, scores in scores_by_layer(llm, ids, front, progress)])


def scores_by_layer(
    llm: Llm,
    ids: Sequence[int],
    front: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Float32[Array, "S D"], Float32[np.ndarray, "K S"]]]:
    """What attention reads of each token in a layer (`hidden_states`), and the layer's scores.

    The arguments, the scores and the errors are those of `context_scores`.
    """
    ids = llm.checked_ids(ids)
    check_int("front", front, 0)
    pieces = repetitions(llm, ids, front) if front < len(ids) else []
    longest = max((len(tokens) for _, tokens in pieces), default=0)
    _check(llm, len(ids), front, longest)
    text = token_parts(llm, ids, 0, len(ids))
    repeats = [token_parts(llm, tokens, len(ids), longest) for _, tokens in pieces]
    policy = Full(max=len(ids) + longest, start=len(ids) + longest)
    size = min(PIECE, len(ids) - front)
    done, total = 0, (len(ids) + sum(len(tokens) for _, tokens in pieces)) * llm.config.layers
    for layer in range(llm.config.layers):
        weights = layer_weights(llm.weights, layer)
        sinks = sink_logits(llm.config, weights)
        scores = np.zeros((llm.config.kv_heads, len(ids)), np.float32)
        hidden = hidden_states(llm.config.norm_eps, weights["attn_norm"], text.x)[: len(ids)]
        state = policy.init(llm.spec, 1, jax.random.key(0))
        state, context = run_layer_on(llm.config, policy, weights, text, state)
        done += len(ids)
        for (piece, tokens), repeat in zip(pieces, repeats, strict=True):
            copied = jax.tree.map(jnp.copy, state)
            _, inputs = run_layer_on(llm.config, policy, weights, repeat, copied)
            first, place = min(SINKS, piece.start), np.int32(piece.start)
            attended = piece_scores(llm.spec, first, size, context, inputs, place, sinks)
            scores[:, piece] = np.asarray(attended)[:, : piece.stop - piece.start]
            done += len(tokens)
            if progress is not None:
                progress(done, total)
        yield hidden, scores


@partial(jax.jit, static_argnums=0)
def hidden_states(
    eps: float, norm: Float[Array, " D"], x: list[Float[Array, "1 T D"]]
) -> Float32[Array, "S D"]:
    """The normalised input of a layer, from which its queries, keys and values are projected."""
    return rms_norm(jnp.concatenate(x, axis=1), norm, eps)[0].astype(jnp.float32)


def _check(llm: Llm, size: int, front: int, longest: int) -> None:
    if not llm.config.llama_form:
        raise UserError(
            f"a context is repeated by models of the form of Llama, got {llm.name} of the family "
            f"{llm.config.family}; use another model"
        )
    if any(window is not None for window in llm.config.windows):
        raise UserError(
            f"a context is repeated where every layer sees all of it, got {llm.name} with sliding "
            "windows; use another model"
        )
    if longest == 0:
        raise UserError(f"a context needs tokens to repeat, got {size - front}; give a longer one")
    if size + longest > llm.config.context:
        limit = max(repeatable_tokens(llm, PIECE), llm.config.context - longest - front)
        raise UserError(
            f"a context and the repetition of a piece must fit the trained context of "
            f"{llm.config.context} tokens, got {size} and {longest}; give at most {limit} tokens"
        )


def token_parts(llm: Llm, ids: Sequence[int], start: int, longest: int) -> TokenParts:
    """Tokens from position `start` on, embedded, in parts whose size follows from `longest`."""
    width = -(-longest // (ALIGNED * -(-longest // CHUNK))) * ALIGNED
    size = -(-len(ids) // width) * width
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(ids)] = ids
    positions = (start + np.arange(size, dtype=np.uint32))[None]
    valid = np.arange(size)[None] < len(ids)
    parts = [slice(at, at + width) for at in range(0, size, width)]
    static = Static(llm.config, (), llm.mesh)
    return TokenParts(
        [tokens[:, part] for part in parts],
        [embed(static, llm.weights, tokens[:, part]) for part in parts],
        [positions[:, part] for part in parts],
        [valid[:, part] for part in parts],
    )


def run_layer_on(
    config: Config, policy: Policy, weights: Weights, tokens: TokenParts, state: State
) -> tuple[State, AttentionInputs]:
    """One layer: `tokens.x` becomes its output. Returns the cache, and what attention read."""
    seen = []
    for number, where in enumerate(zip(tokens.positions, tokens.valid, strict=True)):
        x = tokens.x[number]
        tokens.x[number], state, inputs = run_recorded(config, policy, weights, x, state, *where)
        seen.append(inputs)
    return state, join(seen)


@partial(jax.jit, static_argnums=(0, 1, 2))
def piece_scores(
    spec: Spec,
    sinks: int,
    size: int,
    context: AttentionInputs,
    repeat: AttentionInputs,
    start: Int32[Array, ""],
    sink_logits: Float[Array | np.ndarray, " N"] | None,
) -> Float32[Array, "K P"]:
    """The largest attention of each key of a piece from the queries of its repetition.

    start, size: the place of the piece in the context; beyond the end of the context it is masked.
    ALIGNED queries at a time: a CPU takes three times as long for all queries of a head at once.
    """
    kv_heads, tokens = spec.kv_heads, context.k.shape[1]
    piece = start + jnp.arange(size)
    place = jnp.concatenate([jnp.arange(sinks), jnp.minimum(piece, tokens - 1)])
    rotated = spec.encoding.rotate(context.k[:, place], context.positions[:, place])[0]
    keys = jnp.concatenate([rotated, spec.encoding.rotate(repeat.k, repeat.positions)[0]])
    keys = keys.astype(jnp.float32).transpose(1, 2, 0)  # [K,H,S]
    written = jnp.concatenate([jnp.ones(sinks, bool), piece < tokens])
    written &= context.valid[0, place]
    queries = spec.encoding.rotate(repeat.q, repeat.positions)[0].astype(jnp.float32)
    group = queries.shape[1] // kv_heads
    queries = queries.reshape(-1, ALIGNED, kv_heads, group, spec.head_dim)
    number = jnp.arange(repeat.q.shape[1])
    if sink_logits is not None:
        sink_logits = jnp.reshape(sink_logits, (kv_heads, -1, 1)).astype(jnp.float32)

    def of_block(
        best: Float32[Array, "K P"], block: tuple[Array, Array, Array]
    ) -> tuple[Float32[Array, "K P"], None]:
        q, row, valid = block
        logits = jnp.einsum("tkgh,khs->kgts", q, keys, precision=jax.lax.Precision.HIGHEST)
        repeated = (number[None] <= row[:, None]) & repeat.valid
        visible = jnp.concatenate(
            [jnp.broadcast_to(written, (len(row), len(written))), repeated], axis=1
        )
        logits = jnp.where(visible[None, None], logits * jnp.float32(spec.scale), -jnp.inf)
        total = jax.nn.logsumexp(logits, axis=-1)
        if sink_logits is not None:  # the rest is the sink's
            total = jnp.logaddexp(total, sink_logits)
        share = logits[..., sinks : sinks + size] - total[..., None]
        share = jnp.where(valid[None, None, :, None], share, -jnp.inf)
        return jnp.maximum(best, jnp.max(share, axis=(1, 2))), None

    blocks = queries, number.reshape(-1, ALIGNED), repeat.valid[0].reshape(-1, ALIGNED)
    nothing = jnp.full((kv_heads, size), -jnp.inf, jnp.float32)
    return jnp.exp(jax.lax.scan(of_block, nothing, blocks)[0])
