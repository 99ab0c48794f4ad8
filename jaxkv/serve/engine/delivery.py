"""Delivers the outputs of the device to the listeners of their requests, and counts them."""

from __future__ import annotations

import logging
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from jaxkv.serve.engine.model import StepOutput
from jaxkv.serve.engine.request import Outcome, Request, RequestHandle, ScoredToken
from jaxkv.serve.engine.running import InFlightStep

STEP_EDGES = tuple(4**power for power in range(11))  # tokens: bounds of the histogram of steps
RETRY_SECONDS = (1.0, 60.0)  # minimum and maximum time after which a client should retry
LOG = logging.getLogger(__name__)


@dataclass
class EngineMetrics:
    """Counters of one engine.

    prompt_tokens: tokens in the prompts of started requests.
    generated_tokens: tokens in answers.
    step_tokens: prefilled and decoded tokens of all steps.
    sizes: steps by the number of STEP_EDGES that their tokens exceed.
    seconds: time from the start to the end of an answer, summed over all answers.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_tokens: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_EDGES) + 1))
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count a finished answer."""
        if outcome.queue_seconds is not None:
            self.prompt_tokens += outcome.computed_tokens + outcome.cached_tokens
            self.seconds += outcome.total_seconds - outcome.queue_seconds

    def add_step(self, tokens: int) -> None:
        """Count one step of the engine."""
        self.step_tokens += tokens
        self.sizes[bisect_left(STEP_EDGES, tokens)] += 1

    def export(self) -> dict[str, Any]:
        """The counters by name. step_sizes: steps of at most each edge's tokens, cumulative."""
        edges = [*map(str, STEP_EDGES), "+Inf"]
        return {
            "generation_tokens": self.generated_tokens,
            "step_tokens": self.step_tokens,
            "step_sizes": list(zip(edges, accumulate(self.sizes), strict=True)),
        }

    def estimate_wait(self, tokens: int, max_batch: int) -> float:
        """Estimate the seconds until `tokens` waiting prompt tokens are served."""
        seconds_per_token = self.seconds / max(1, self.prompt_tokens) / max_batch
        return min(max(RETRY_SECONDS[0], tokens * seconds_per_token), RETRY_SECONDS[1])


class Delivery:
    """Calls the listeners. finish: ends a request, given the reason and an error message."""

    def __init__(self, finish: Callable[..., None], metrics: EngineMetrics) -> None:
        self._finish, self._metrics = finish, metrics

    def deliver(self, step: InFlightStep) -> float:
        """Wait for a step's output, deliver it to the listeners, and return when it came."""
        output = on_host(step.output)
        now = time.monotonic()
        for index, handle in step.handles:
            if handle.finished:
                continue
            if not output.finite[index]:
                self._finish(handle, "error", "the model's logits are not finite")
            elif handle.request.max_new_tokens == 0 and step.prompt_start is None:
                self._deliver_prompt(handle)
                self._finish(handle, "length")
            else:
                scored = scored_token(handle.request, output, index)
                if step.prompt_start is not None:
                    first = step.prompt_start + index == 0
                    handle.prompt_scores.append(ScoredToken(scored.token) if first else scored)
                else:
                    self._deliver_token(handle, scored, now)
        return now

    def _deliver_token(self, handle: RequestHandle, scored: ScoredToken, now: float) -> None:
        request = handle.request
        handle.generated += 1
        self._metrics.generated_tokens += 1
        if handle.first_token_seconds is None:
            handle.first_token_seconds = now - handle.arrival
            self._deliver_prompt(handle)
            if handle.finished:
                return
        stop = self.call(handle, "token", scored)
        if handle.finished:
            return
        if scored.token in request.eos:
            self._finish(handle, "eos")
        elif stop:
            self._finish(handle, "stop")
        elif handle.matched == handle.generated and request.matcher.ended:
            self._finish(handle, "eos")
        elif handle.generated == request.max_new_tokens:
            self._finish(handle, "length")

    def _deliver_prompt(self, handle: RequestHandle) -> None:
        if handle.request.echo:
            self.call(handle, "prompt", handle.prompt_scores)

    def call(self, handle: RequestHandle, name: str, value: Any) -> bool:
        """Call a listener; returns its result. An exception ends its request and no other."""
        try:
            return bool(getattr(handle.listener, name)(value))
        except Exception:
            LOG.exception("a listener failed")
            self._finish(handle, "error", traceback.format_exc().splitlines()[-1])
            return False


def on_host(output: StepOutput) -> StepOutput:
    """Wait for a step's output and copy it to the host."""
    return StepOutput(*map(np.asarray, output))


def scored_token(request: Request, output: StepOutput, index: int) -> ScoredToken:
    """One token of a step's output, with the log probabilities that the request wants."""
    token = int(output.token[index])
    if request.logprobs is None:
        return ScoredToken(token)
    top = zip(output.top[index].tolist(), output.top_logprobs[index].tolist(), strict=True)
    return ScoredToken(token, float(output.logprob[index]), tuple(top)[: request.logprobs])
