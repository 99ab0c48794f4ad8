"""KVzap: KVzip's scores predicted from hidden states, so that a prompt is read once.

KVzip reads a prompt a second time to score its keys (context_scores.py). KVzap (arXiv 2601.07891)
predicts the logarithm of the score of a key from what the attention of the layer reads of its
token. `fit_kvzap` fits one ridge regression per layer, with an output for each KV head, on plain
text: the linear form of the published code, which has a small network as well.

Five choices differ from that code. Its scores multiply the attention by the norm of the projected
value and divide it by the norm of the query's hidden state (KVzip+); ours are those of KVzip. Its
queries are those of the repetition; ours are those of the request and of the template, too. Its
softmax is over all keys; ours is that of context_scores.py. It fits all logarithms; ours are cut at
FLOOR. It keeps all tokens above a score; `Scored` keeps a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, State
from jaxkv.errors import UserError
from jaxkv.models.generation.context_scores import (
    TokenParts,
    around_context,
    hidden_states,
    repeatable_tokens,
    run_layer_on,
    scores_by_layer,
    token_parts,
)
from jaxkv.models.generation.decoding import end_chunk
from jaxkv.models.generation.kvzip import check_scored, compress, while_reading
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.decoder import layer_weights
from jaxkv.policies import Full
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.typing import Float, Float32

FIT_TOKENS = 1024  # tokens that are scored together; published: texts of 750 to 1,250 tokens
ALPHA = 1.0  # the penalty of the squared weights, not of the bias
FLOOR = 1e-8  # of a score: the logarithms of smaller ones, and of 0, would decide the fit


class KVzap(NamedTuple):
    """Predicts log scores: `kernel @ hidden + bias`, for the model with this fingerprint."""

    kernel: Float32[np.ndarray, "L K D"]
    bias: Float32[np.ndarray, "L K"]
    fingerprint: str


def fit_kvzap(llm: Llm, text: str) -> KVzap:
    """Fit KVzap to the scores of a text.

    Passages of FIT_TOKENS, or of as many as fit the trained context twice, are contexts of their
    own. A shorter rest is left out.

    Raises UserError for a text shorter than a passage, and as `context_scores` does.
    """
    size = repeatable_tokens(llm, FIT_TOKENS)
    front, _ = around_context(llm)
    ids = llm.tokenizer.encode(text, bos=False, start=False)
    starts = range(0, len(ids) - size + 1, size)
    if not starts:
        raise UserError(
            f"KVzap is fitted to passages of {size} tokens, got a text of {len(ids)}; give a "
            "longer one"
        )
    layers, kv_heads, width = llm.config.layers, llm.config.kv_heads, llm.config.width
    gram = np.zeros((layers, width + 1, width + 1))
    cross = np.zeros((layers, width + 1, kv_heads))
    for start in starts:
        context = [*front, *ids[start : start + size]]
        for layer, (hidden, scores) in enumerate(scores_by_layer(llm, context, len(front))):
            inputs = np.pad(np.asarray(hidden, np.float64)[len(front) :], ((0, 0), (0, 1)))
            inputs[:, -1] = 1.0
            gram[layer] += inputs.T @ inputs
            cross[layer] += inputs.T @ np.log(np.maximum(scores[:, len(front) :], FLOOR)).T
    solved = ridge(gram, cross, ALPHA).transpose(0, 2, 1).astype(np.float32)
    kernel, bias = map(np.ascontiguousarray, (solved[..., :-1], solved[..., -1]))
    return _checked(llm, KVzap(kernel, bias, llm.source_fingerprint))


def ridge(
    gram: Float[np.ndarray, "L E E"], cross: Float[np.ndarray, "L E K"], alpha: float
) -> Float[np.ndarray, "L E K"]:
    """Ridge regression from the sums of products of inputs, and of inputs and targets.

    The last input is 1, and its weight has no penalty.
    """
    penalty = alpha * np.diag(np.arange(gram.shape[-1]) < gram.shape[-1] - 1)
    return np.linalg.solve(gram + penalty, cross)


def kvzap_scores(llm: Llm, weights: KVzap, ids: Sequence[int]) -> Float32[np.ndarray, "L K S"]:
    """The predicted log score of each key of a prompt.

    Raises UserError for weights of another model, and for a prompt without tokens of the model.
    """
    prompt, policy = _prompt(llm, weights, ids), Full(max=len(ids), start=len(ids))
    layers = ((policy, policy.init(llm.spec, 1, jax.random.key(0))) for _ in weights.bias)
    return np.stack([scores for scores, _ in _read(llm, weights, prompt, layers)])


def kvzap_stream(
    llm: Llm, ids: Sequence[int], weights: KVzap, policy: Scored, seed: int = 0
) -> Stream:
    """A stream that has read a prompt once, compressed by predicted scores.

    It can decode, or read more tokens first:

        weights = fit_kvzap(llm, text)
        policy = Scored(capacity=256, window=128, budgets="global")
        stream = kvzap_stream(llm, ids, weights, policy)
        tokens, ended = stream.decode(llm.sampling, 64, llm.eos)

    policy: of every layer; the published code keeps the newest 128 tokens, as `window` does.
    Raises UserError for another policy, and as `kvzap_scores` does.
    """
    check_scored(policy)
    prompt = _prompt(llm, weights, ids)
    stream = Stream(llm, while_reading(policy), seed=seed, tokens=len(ids))
    stream.reserve(len(ids))
    decoding = stream.decoding._replace(states=())
    layers = zip(stream.policies, stream.decoding.states, strict=True)
    scores, states = zip(*_read(llm, weights, prompt, layers), strict=True)
    for part in zip(prompt.x, prompt.ids, prompt.valid, strict=True):
        decoding = end_chunk(stream.static.of_model, llm.weights, decoding, *part)
    stream.decoding = decoding._replace(states=states)
    compress(stream, policy, [np.stack(scores)])
    return stream


def _prompt(llm: Llm, weights: KVzap, ids: Sequence[int]) -> TokenParts:
    """A prompt to read. Raises UserError as `kvzap_scores` does."""
    _checked(llm, weights)
    ids = llm.checked_ids(ids)
    if len(ids) == 0:
        raise UserError("the prompt is empty; give at least one token")
    return token_parts(llm, ids, 0, len(ids))


def _read(
    llm: Llm, weights: KVzap, prompt: TokenParts, layers: Iterable[tuple[Policy, State]]
) -> Iterator[tuple[Float32[np.ndarray, "K S"], State]]:
    """The predicted scores of each layer, and its cache; `prompt.x` becomes the last output."""
    size = sum(int(valid.sum()) for valid in prompt.valid)
    for layer, (policy, state) in enumerate(layers):
        of_layer = layer_weights(llm.weights, layer)
        hidden = hidden_states(llm.config.norm_eps, of_layer["attn_norm"], prompt.x)[:size]
        predicted = jnp.matmul(weights.kernel[layer], hidden.T, precision="highest")
        scores = np.asarray(predicted) + weights.bias[layer][:, None]
        state, _ = run_layer_on(llm.config, policy, of_layer, prompt, state)
        yield scores, state


def _checked(llm: Llm, weights: KVzap) -> KVzap:
    """The weights. Raises UserError for another type or model, and for infinite numbers or NaN."""
    if not isinstance(weights, KVzap):
        raise UserError(f"weights must be a KVzap, got {weights!r:.60}; fit_kvzap makes one")
    if weights.fingerprint != llm.source_fingerprint:
        raise UserError(
            f"the KVzap weights belong to another model ({weights.fingerprint}, not "
            f"{llm.source_fingerprint}); name that model, or fit them to {llm.name}"
        )
    shape = llm.config.layers, llm.config.kv_heads, llm.config.width
    shapes = weights.kernel.shape, weights.bias.shape
    if shapes != (shape, shape[:2]) or not all(np.isfinite(w).all() for w in weights[:2]):
        raise UserError(
            f"KVzap weights of {llm.name} must be finite, {list(shape)} and {list(shape[:2])}, got "
            f"{' and '.join(str(list(s)) for s in shapes)}; fit them again"
        )
    return weights
