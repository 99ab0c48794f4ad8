"""Bounded KV caches for JAX: unbounded generation in constant memory.

Names are imported on first use, so that `jaxkv --help` does not wait for JAX.
"""

import importlib

__version__ = "0.1.0.dev0"

_HOME = {
    "Alibi": "jaxkv.rotary",
    "Cached": "jaxkv.contract",
    "Chunk": "jaxkv.contract",
    "Leaf": "jaxkv.contract",
    "NoPosition": "jaxkv.rotary",
    "POLICIES": "jaxkv.policies",
    "Partial": "jaxkv.contract",
    "Policy": "jaxkv.contract",
    "Rotary": "jaxkv.rotary",
    "Spec": "jaxkv.contract",
    "UserError": "jaxkv.errors",
    "by_layer": "jaxkv.policy_spec",
    "chunked_scan": "jaxkv.attention",
    "describe": "jaxkv.policy_spec",
    "format_policy": "jaxkv.policy_spec",
    "local_attention": "jaxkv.attention",
    "masked_bias": "jaxkv.attention",
    "merge": "jaxkv.attention",
    "policy": "jaxkv.policy_spec",
    "sink_logit": "jaxkv.attention",
    "slot_attention": "jaxkv.attention",
    "state_bytes": "jaxkv.policy_spec",
    "step": "jaxkv.driver",
}
# A test compares these names with jaxkv.policies.POLICIES.
_HOME |= dict.fromkeys(
    (
        *("Balance", "BalanceStream", "ExpectedAttention", "Full", "H2O", "KeyDiff", "Loki"),
        *("MagicPIG", "Oracle", "PyramidKV", "Quest", "RKV", "Reservoir", "Retrieval", "SnapKV"),
        *("Stratified", "Streaming", "TOVA", "TopK", "TopP", "TriAttention", "Uniform"),
        *("VAttention", "VaSE", "Window"),
    ),
    "jaxkv.policies",
)

_PACKAGES = ("models", "serve", "testing")  # `jaxkv.models.load` works without importing it first

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"jaxkv.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    attribute = "parse_policy" if name == "policy" else name
    return getattr(importlib.import_module(_HOME[name]), attribute)


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]
