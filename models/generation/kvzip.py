"""KVzip: a prompt compressed by the attention that its keys get while the model repeats it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.generation.context_scores import context_scores
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.policies.prompt_compression.scored import Scored, global_budgets
from jaxkv.typing import Float32


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
    `capacity` tokens a KV head among all layers, as the published code does by default. Each
    context then has caches of sizes of its own, for which the end of the prompt and the answer are
    compiled.

    Raises UserError for another policy, and as `context_scores` does.
    """
    check_scored(policy)
    scores = context_scores(llm, ids, front)
    stream = Stream(llm, while_reading(policy), seed=seed, tokens=len(ids))
    stream.prefill([ids])
    stream.static = stream.static._replace(policies=tuple(layer_policies(policy, scores)))
    compress(stream, scores)
    return stream


def while_reading(policy: Scored) -> Scored:
    """The policy during a prompt, when caches are the same under all budgets.

    Global budgets follow from the scores, and would compile a program for each layer.
    """
    if policy.budgets != "global":
        return policy
    return replace(policy, budgets="adaptive", head_budgets=())


def check_scored(policy: object) -> None:
    """Raise UserError unless a policy takes scores from outside."""
    if not isinstance(policy, Scored) or policy.function is not None:
        raise UserError(
            f"policy must be a Scored without a function, got {policy!r:.60}; give "
            "Scored(capacity=256)"
        )


def compress(stream: Stream, scores: Float32[np.ndarray, "L K S"]) -> None:
    """Finish the prefill of a stream of one sequence under `Scored` by the scores of its keys."""
    layers = zip(stream.policies, stream.decoding.states, scores, strict=True)
    states = tuple(policy.with_scores(state, of_layer[None]) for policy, state, of_layer in layers)
    stream.decoding = stream.decoding._replace(states=states)
    stream.finish_prefill()


def layer_policies(policy: Scored, scores: Float32[np.ndarray, "L K S"]) -> list[Scored]:
    """The policy of each layer, with the budgets of its KV heads where they are global."""
    if policy.budgets != "global":
        return [policy] * len(scores)
    between = scores[:, :, policy.sinks : max(policy.sinks, scores.shape[2] - policy.window)]
    budgets = global_budgets(between, policy.budget)
    return [replace(policy, head_budgets=of_layer) for of_layer in budgets]
