"""Continuous batching over any decoder; the engine knows no model and no tokenizer."""

from jaxkv.engine.collect import Collected, answer
from jaxkv.engine.engine import Engine
from jaxkv.engine.handle import RequestHandle
from jaxkv.engine.model import Model
from jaxkv.engine.request import Listener, Outcome, Overloaded, Request, ScoredToken
from jaxkv.engine.store import PrefixConfig
from jaxkv.prefix.folder import PrefixFolder

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
