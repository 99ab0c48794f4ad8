"""One method, one frozen dataclass, one short file; this table is the list of them."""

from jaxkv.policies.full import Full
from jaxkv.policies.streaming import Streaming
from jaxkv.policies.window import Window

POLICIES = {"full": Full, "window": Window, "streaming": Streaming}

__all__ = ["POLICIES", "Full", "Streaming", "Window"]
