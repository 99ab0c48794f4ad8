"""Bounded KV caches for JAX: unbounded generation in constant memory.

Names are imported on first use, so that `jaxkv --help` does not wait for JAX.
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
    "Cached": "jaxkv.contract",
    "Leaf": "jaxkv.contract",
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
    "by_layer": "jaxkv.policy_spec",
    "describe": "jaxkv.policy_spec",
    "local_attention": "jaxkv.attention",
    "merge": "jaxkv.attention",
    "policy": "jaxkv.policy_spec",
    "sink_logit": "jaxkv.attention",
    "slot_attention": "jaxkv.attention",
    "format_policy": "jaxkv.policy_spec",
    "state_bytes": "jaxkv.policy_spec",
    "step": "jaxkv.driver",
}

# What needs more than jax and numpy: `jaxkv.models.load` works without importing it first.
_PACKAGES = ("engine", "models", "testing")

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"jaxkv.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    found = "parse_policy" if name == "policy" else name
    return getattr(importlib.import_module(_HOME[name]), found)


def __dir__() -> list[str]:
    return __all__
