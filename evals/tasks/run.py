"""Reads prompts under a policy, and follows the answer of full attention with it.

Policies that act at the end of prefill attend exactly until then. So full attention reads a context
once, its queries, keys and values are recorded, and each of these policies takes them in from
there. Policies that evict read the context themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Policy, State
from jaxkv.evals.tasks import model_rows, score
from jaxkv.evals.tasks.prompts import ROOM, TaskPrompt, answer_places
from jaxkv.models.generation.kvzip import compress, while_reading
from jaxkv.models.generation.shared_prompt import AttentionInputs, absorb, join, run_recorded
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.config import Config, of_layer
from jaxkv.models.network.decoder import Decoder, Weights, layer_weights
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.typing import Array, Float, Float32

WIDTH = 64  # tokens of every compiled program, so that each policy compiles one
# Of a result, per sample.
COLUMNS = ("score", "kl", "agreement", "tokens", "state_bytes", "answer_heads")


class Followed(NamedTuple):
    """The greedy answers of full attention, and its hidden states where it predicts them."""

    answers: list[list[int]]
    hidden: Float[Array, "B T D"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts that are read together.

    tokens: maximal number of tokens of an answer. slots: slots of growing caches. seeds: seeds of
    the draws of each sequence. match: the score of an answer.
    """

    llm: Llm
    prompts: Sequence[TaskPrompt]
    tokens: int
    slots: int
    seeds: Sequence[int]
    match: score.Match = score.match

    def result(self, policy: str) -> Float[np.ndarray, "B C"]:
        """The COLUMNS of every prompt under a policy; `full` is the reference itself."""
        full = self.full
        counts = np.array(list(map(len, full.answers)))
        stream = self.prefill(self.full_policy if policy == "full" else policy)
        answer_heads = self.answer_heads(stream)
        if policy == "full":
            kl, agreement, answers = np.zeros(len(counts)), np.ones(len(counts)), full.answers
        else:
            kl, agreement = self.divergence(stream)
            if not np.isfinite(kl).all():
                raise SystemExit(f"{policy} gives logits that are not finite; nothing is written")
            # Where every likeliest token is that of full attention, the greedy answer is too.
            answers = full.answers if (agreement == 1).all() else self.greedy(stream)
        texts = [self.llm.tokenizer.decode(answer) for answer in answers]
        right = [self.match(t, p.answers) for t, p in zip(texts, self.prompts, strict=True)]
        state_bytes = np.full(len(counts), stream.state_bytes / len(counts))
        return np.stack([right, kl, agreement, counts, state_bytes, answer_heads], axis=1)

    def answer_heads(self, stream: models.Stream) -> Float[np.ndarray, " B"]:
        """The share of KV heads, of all layers, that cache every answer of a prompt.

        NaN where the tokens of an answer are not in the context.
        """
        states = zip(stream.policies, self.llm.specs, stream.decoding.states, strict=True)
        layers = [policy.cached(spec, state) for policy, spec, state in states]
        layers = [tuple(map(np.asarray, layer)) for layer in layers]
        shares = np.full(len(self.prompts), np.nan)
        for row, prompt in enumerate(self.prompts):
            heads = (head for p, w in layers for head in zip(p[row], w[row], strict=True))
            cached = [set(p[w > -np.inf].tolist()) for p, w in heads]
            places = answer_places(self.llm, prompt)
            if all(places):
                shares[row] = np.mean(
                    [all(any(map(x.issuperset, at)) for at in places) for x in cached]
                )
        return shares

    def divergence(self, stream: models.Stream) -> tuple[Float[np.ndarray, " B"], ...]:
        """KL and top-1 agreement of each prompt, means over the tokens of full's answer."""
        full, llm = self.full, self.llm
        hidden = self.follow(stream, full.answers)
        measures = score.divergence(llm.config, llm.weights, full.hidden, hidden)
        counts = map(len, full.answers)
        means = [
            [row[:count].mean() for row in rows]
            for count, rows in zip(
                counts, zip(*map(np.asarray, measures), strict=True), strict=True
            )
        ]
        return tuple(np.array(means, np.float64).T)

    @property
    def full_policy(self) -> str:
        return f"full:start={self.slots},max={self.slots}"

    @property
    def full_policies(self) -> tuple[Policy, ...]:
        return self.llm.policies(self.full_policy)

    @cached_property
    def full(self) -> Followed:
        """The answers of full attention."""
        stream = self.prefill(self.full_policy)
        answers = self.greedy(stream)
        return Followed(answers, self.follow(self.prefill(self.full_policy), answers))

    def prefill(self, policy: str) -> models.Stream:
        """A stream that has read the contexts, prefill finished, with room for the rest."""
        llm = self.llm
        chosen = model_rows.policy_of(policy)
        stream = models.Stream(llm, while_reading(chosen), batch=len(self.prompts), seed=self.seeds)
        contexts = [prompt.context for prompt in self.prompts]
        lengths = np.array(list(map(len, contexts)))
        stream.reserve(lengths)
        states, policies = stream.decoding.states, stream.static.programs
        if policy == self.full_policy:
            states = self.recorded[0]
        elif all(layer_policy.min_prompt is not None for layer_policy in policies):
            layers = zip(policies, llm.specs, states, self.recorded[1], strict=True)
            states = tuple(absorb(*of_one) for of_one in layers)
        else:
            _, states, _ = self.read(policies, states, np.zeros_like(lengths), contexts)
        position = jnp.asarray(lengths, jnp.uint32)
        stream.decoding = stream.decoding._replace(states=states, position=position)
        if isinstance(chosen, Scored):
            method = policy.partition(":")[0]
            scores = [model_rows.scores(llm, method, tuple(context)) for context in contexts]
            compress(stream, chosen, scores)
        else:
            stream.finish_prefill()
        stream.reserve(ROOM)
        stream.lengths = lengths
        return stream

    @cached_property
    def recorded(self) -> tuple[tuple[State, ...], list[AttentionInputs]]:
        """The states of full attention after the contexts, and what each layer attended with."""
        stream = models.Stream(self.llm, self.full_policy, batch=len(self.prompts))
        contexts = [prompt.context for prompt in self.prompts]
        start = np.zeros(len(contexts), int)
        return self.read(stream.static.programs, stream.decoding.states, start, contexts)[1:]

    def follow(
        self, stream: models.Stream, answers: Sequence[Sequence[int]]
    ) -> Float[Array, "B T D"]:
        """The hidden states that predict these answers, token by token, after the prompts."""
        rest = [prompt.rest for prompt in self.prompts]
        ids = [[*r, *answer[:-1]] for r, answer in zip(rest, answers, strict=True)]
        states = stream.decoding.states
        hidden, _, _ = self.read(stream.static.programs, states, stream.lengths, ids)
        first = np.array(list(map(len, rest)))[:, None] - 1
        place = np.minimum(first + np.arange(self.tokens), hidden.shape[1] - 1)
        return jnp.take_along_axis(hidden, jnp.asarray(place)[..., None], axis=1)

    def greedy(self, stream: models.Stream) -> list[list[int]]:
        """The greedy answers after the prompts, each with the token that ends it."""
        rest = [prompt.rest for prompt in self.prompts]
        states = stream.decoding.states
        hidden, states, _ = self.read(stream.static.programs, states, stream.lengths, rest)
        counts = np.array(list(map(len, rest)))
        last = jnp.take_along_axis(hidden, jnp.asarray(counts - 1)[:, None, None], axis=1)
        stream.lengths = stream.lengths + counts
        stream.decoding = stream.decoding._replace(
            states=states,
            logits=logits(self.llm.config, self.llm.weights, last),
            position=jnp.asarray(stream.lengths, jnp.uint32),
            done=jnp.zeros(len(rest), bool),
        )
        out, _ = stream.decode(models.Sampling(), self.tokens, self.llm.eos)
        return [[int(token) for token in row if token >= 0] for row in out]

    def read(
        self, policies: tuple[Policy, ...], states: tuple[State, ...], start: np.ndarray,
        ids: Sequence[Sequence[int]],
    ) -> tuple[Array, tuple[State, ...], list[AttentionInputs]]:  # fmt: skip
        """Hidden states and states after more tokens, and what each layer attended with.

        start: position of the first token of each sequence. Only full attention is recorded.
        """
        size = -(-max(map(len, ids)) // WIDTH) * WIDTH
        tokens, valid = np.zeros((2, len(ids), size), np.int32)
        for row, real, sequence in zip(tokens, valid, ids, strict=True):
            row[: len(sequence)], real[: len(sequence)] = sequence, 1
        positions = (start[:, None] + np.arange(size)).astype(np.uint32)
        llm, hidden, seen = self.llm, [], []
        states = jax.tree.map(jnp.copy, states)  # `run_recorded` takes them
        decoder, recording = Decoder(llm.config, llm.weights), policies == self.full_policies
        for at in range(0, size, WIDTH):
            part, *where = (a[:, at : at + WIDTH] for a in (tokens, positions, valid.astype(bool)))
            x, new, chunks = decoder.embedded(part), [], []
            for layer, (policy, state) in enumerate(zip(policies, states, strict=True)):
                weights = layer_weights(llm.weights, layer)
                config = of_layer(llm.config, layer)
                x, state, attended = run_recorded(config, policy, weights, x, state, *where)
                new, chunks = [*new, state], [*chunks, attended] if recording else chunks
            states, hidden, seen = tuple(new), [*hidden, decoder.normed(x)], [*seen, chunks]
        layers = list(map(join, zip(*seen, strict=True)))
        return jnp.concatenate(hidden, axis=1), states, layers


@partial(jax.jit, static_argnums=0)
def logits(
    config: Config, weights: Weights, hidden: Float[Array, "B 1 D"]
) -> Float32[Array, "B V"]:
    return Decoder(config, weights).logits(hidden)[:, 0]
