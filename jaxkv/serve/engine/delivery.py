"""Delivers the outputs of the device to the listeners of their requests."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.serve.engine.engine_metrics import EngineMetrics
from jaxkv.serve.engine.handle import InFlightStep, RequestHandle, scored_token
from jaxkv.serve.engine.request import ScoredToken
from jaxkv.serve.engine.step_output import StepOutput

LOG = logging.getLogger(__name__)


class Delivery:
    """Calls the listeners. finish: ends a request, given the reason and an error message."""

    def __init__(self, finish: Callable[..., None], metrics: EngineMetrics) -> None:
        self._finish, self._metrics = finish, metrics

    def deliver(self, step: InFlightStep) -> None:
        """Wait for a step's output and deliver it to the listeners."""
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
