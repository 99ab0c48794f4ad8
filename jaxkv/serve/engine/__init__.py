"""Continuous batching over any decoder; the engine knows no model and no tokenizer."""

from jaxkv.serve.engine.engine import Collected, Engine, answer
from jaxkv.serve.engine.model import Model
from jaxkv.serve.engine.request import (
    Listener,
    Outcome,
    Overloaded,
    Request,
    RequestHandle,
    ScoredToken,
)
from jaxkv.serve.engine.store import PrefixConfig
from jaxkv.serve.prefix.folder import PrefixFolder

__all__ = [
    "Collected",
    "Engine",
    "Listener",
    "Model",
    "Outcome",
    "Overloaded",
    "PrefixConfig",
    "PrefixFolder",
    "Request",
    "RequestHandle",
    "ScoredToken",
    "answer",
]
