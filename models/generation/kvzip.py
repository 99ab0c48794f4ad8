"""KVzip: a prompt compressed by the attention that its keys get while the model repeats it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.generation.context_scores import context_scores
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.policies.prompt_compression.scored import Scored, global_budgets
from jaxkv.typing import Float32, Integer

Policies = TypeVar("Policies")  # a policy, its string, or one per layer
ROWS = 256  # a multiple of the rows of a layer under global budgets


def kvzip_stream(llm: Llm, ids: Sequence[int], front: int, policy: Scored, seed: int = 0) -> Stream:
    """A stream that has read a context, compressed by KVzip's scores (arXiv 2505.23416).

    A question may come after it:

        from jaxkv.models.generation.context_scores import around_context

        front, answer = around_context(llm)
        context = llm.tokenizer.encode(text, bos=False)
        policy = Scored(capacity=256, budgets="global")
        stream = kvzip_stream(llm, [*front, *context], len(front), policy)
        stream.prefill([llm.tokenizer.encode(question, bos=False, start=False) + answer])
        tokens, ended = stream.decode(llm.sampling, 64, llm.eos)

    ids, front: as in `context_scores`. policy: of every layer; `budgets=global` shares
    `capacity` tokens a KV head among all layers, as the published code does by default. The rows of
    a layer are then rounded up to a multiple of ROWS, so that contexts share programs.

    Raises UserError for another policy, and as `context_scores` does.
    """
    check_scored(policy)
    scores = context_scores(llm, ids, front)
    stream = Stream(llm, while_reading(policy), seed=seed, tokens=len(ids))
    stream.prefill([ids])
    compress(stream, policy, [scores])
    return stream


def while_reading(policy: Policies) -> Policies:
    """The policy during a prompt; other budgets than global ones, and other policies, are kept.

    Global budgets follow from the scores of the prompt.
    """
    is_global = isinstance(policy, Scored) and policy.budgets == "global"
    return replace(policy, budgets="adaptive") if is_global else policy


def check_scored(policy: object) -> None:
    """Raise UserError unless a policy takes scores from outside."""
    if not isinstance(policy, Scored) or policy.function is not None:
        raise UserError(
            f"policy must be a Scored without a function, got {policy!r:.60}; give "
            "Scored(capacity=256)"
        )


def compress(
    stream: Stream, policy: Scored, scores: Sequence[Float32[np.ndarray, "L K S"]]
) -> None:
    """Finish a prefill under `while_reading(policy)` by the scores of the keys of each sequence."""
    layers, kv_heads, _ = scores[0].shape
    size = max(of_sequence.shape[2] for of_sequence in scores)
    padded = np.zeros((layers, len(scores), kv_heads, size), np.float32)
    for number, of_sequence in enumerate(scores):
        padded[:, number, :, : of_sequence.shape[2]] = of_sequence
    policies, budgets = [policy] * layers, [None] * layers
    if policy.budgets == "global":
        budgets = np.stack([_global_budgets(policy, x) for x in scores], axis=1)  # [L,B,K]
        rows = -(-budgets.sum(axis=2).max(axis=1) // ROWS) * ROWS
        policies = [replace(policy, rows=int(count)) for count in rows]
    of_layers = zip(policies, stream.decoding.states, padded, budgets, strict=True)
    states = tuple(of_layer.with_scores(*arguments) for of_layer, *arguments in of_layers)
    stream.static = stream.static._replace(policies=tuple(policies))
    stream.decoding = stream.decoding._replace(states=states)
    stream.finish_prefill()


def _global_budgets(
    policy: Scored, scores: Float32[np.ndarray, "L K S"]
) -> Integer[np.ndarray, "L K"]:
    end = max(policy.sinks, scores.shape[2] - policy.window)
    return global_budgets(scores[:, :, policy.sinks : end], policy.budget)
