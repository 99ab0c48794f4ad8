"""Bounded key-value caches for JAX: text without end in a fixed memory."""

from jaxkv.attention import local_attention, merge, sink_logit, slot_attention
from jaxkv.contract import Chunk, Kept, Partial, Policy, Spec
from jaxkv.errors import UserError
from jaxkv.policies import POLICIES, Full, Streaming, Window
from jaxkv.rotary import Alibi, NoPosition, Rotary, rotary
from jaxkv.stack import by_layer, describe, policy, spell, state_bytes
from jaxkv.step import step

__version__ = "0.1.0.dev0"

__all__ = [
    "POLICIES",
    "Alibi",
    "Chunk",
    "Full",
    "Kept",
    "NoPosition",
    "Partial",
    "Policy",
    "Rotary",
    "Spec",
    "Streaming",
    "UserError",
    "Window",
    "by_layer",
    "describe",
    "local_attention",
    "merge",
    "policy",
    "rotary",
    "sink_logit",
    "slot_attention",
    "spell",
    "state_bytes",
    "step",
]
