"""One method, one frozen dataclass, one short file; this table is the list of them."""

from jaxkv.policies.balance import Balance
from jaxkv.policies.balance_stream import BalanceStream
from jaxkv.policies.full import Full
from jaxkv.policies.h2o import H2O
from jaxkv.policies.pyramidkv import PyramidKV
from jaxkv.policies.reservoir import Reservoir
from jaxkv.policies.snapkv import SnapKV
from jaxkv.policies.stratified import Stratified
from jaxkv.policies.streaming import Streaming
from jaxkv.policies.uniform import Uniform
from jaxkv.policies.window import Window

POLICIES = {
    "full": Full,
    "window": Window,
    "streaming": Streaming,
    "h2o": H2O,
    "reservoir": Reservoir,
    "stratified": Stratified,
    "balance-stream": BalanceStream,
    "balance": Balance,
    "uniform": Uniform,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
}

__all__ = [
    "H2O",
    "POLICIES",
    "Balance",
    "BalanceStream",
    "Full",
    "PyramidKV",
    "Reservoir",
    "SnapKV",
    "Stratified",
    "Streaming",
    "Uniform",
    "Window",
]
