"""Bounded key-value caches for JAX: text without end in a fixed memory.

Names are imported when first used, so that `jaxkv --help` need not wait for jax.
"""

import importlib

__version__ = "0.1.0.dev0"

_HOME = {
    "Alibi": "jaxkv.rotary",
    "Balance": "jaxkv.policies",
    "BalanceStream": "jaxkv.policies",
    "Chunk": "jaxkv.contract",
    "Full": "jaxkv.policies",
    "H2O": "jaxkv.policies",
    "Kept": "jaxkv.contract",
    "NoPosition": "jaxkv.rotary",
    "POLICIES": "jaxkv.policies",
    "Partial": "jaxkv.contract",
    "Policy": "jaxkv.contract",
    "PyramidKV": "jaxkv.policies",
    "Reservoir": "jaxkv.policies",
    "Rotary": "jaxkv.rotary",
    "SnapKV": "jaxkv.policies",
    "Spec": "jaxkv.contract",
    "Stratified": "jaxkv.policies",
    "Streaming": "jaxkv.policies",
    "Uniform": "jaxkv.policies",
    "UserError": "jaxkv.errors",
    "Window": "jaxkv.policies",
    "by_layer": "jaxkv.stack",
    "describe": "jaxkv.stack",
    "local_attention": "jaxkv.attention",
    "merge": "jaxkv.attention",
    "policy": "jaxkv.stack",
    "sink_logit": "jaxkv.attention",
    "slot_attention": "jaxkv.attention",
    "spell": "jaxkv.stack",
    "state_bytes": "jaxkv.stack",
    "step": "jaxkv.driver",
}

# What needs more than jax and numpy: `jaxkv.models.load` works without importing it first.
_PACKAGES = ("engine", "models")

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"jaxkv.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
