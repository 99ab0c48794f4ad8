"""One method, one frozen dataclass, one short file; this table is the list of them."""

from jaxkv.policies.balance import Balance
from jaxkv.policies.balance_stream import BalanceStream
from jaxkv.policies.full import Full
from jaxkv.policies.h2o import H2O
from jaxkv.policies.magicpig import MagicPIG
from jaxkv.policies.oracle import Oracle
from jaxkv.policies.pyramidkv import PyramidKV
from jaxkv.policies.quest import Quest
from jaxkv.policies.reservoir import Reservoir
from jaxkv.policies.snapkv import SnapKV
from jaxkv.policies.stratified import Stratified
from jaxkv.policies.streaming import Streaming
from jaxkv.policies.topk import TopK
from jaxkv.policies.topp import TopP
from jaxkv.policies.uniform import Uniform
from jaxkv.policies.vattention import VAttention
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
    "magicpig": MagicPIG,
    "topk": TopK,
    "topp": TopP,
    "oracle": Oracle,
    "quest": Quest,
    "vattention": VAttention,
}

__all__ = [
    "H2O",
    "POLICIES",
    "Balance",
    "BalanceStream",
    "Full",
    "MagicPIG",
    "Oracle",
    "PyramidKV",
    "Quest",
    "Reservoir",
    "SnapKV",
    "Stratified",
    "Streaming",
    "TopK",
    "TopP",
    "Uniform",
    "VAttention",
    "Window",
]
