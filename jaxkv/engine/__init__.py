"""Continuous batching over any forward function; no part of it knows of a model or a tokenizer."""

from jaxkv.engine.collect import Collected, answer
from jaxkv.engine.engine import Engine, Ticket
from jaxkv.engine.programs import Model
from jaxkv.engine.request import Listener, Outcome, Overloaded, Request, Scored
from jaxkv.engine.store import Prefixes

__all__ = [
    "Collected",
    "Engine",
    "Listener",
    "Model",
    "Outcome",
    "Overloaded",
    "Prefixes",
    "Request",
    "Scored",
    "Ticket",
    "answer",
]
