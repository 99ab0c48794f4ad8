"""The cache policies: one frozen dataclass per method, and the table of their names."""

from jaxkv.policies.full import Full
from jaxkv.policies.h2o import H2O
from jaxkv.policies.magicpig.policy import MagicPIG
from jaxkv.policies.merge_reduce.balance_stream import BalanceStream
from jaxkv.policies.merge_reduce.stratified import Stratified
from jaxkv.policies.prompt_compression.balance import Balance
from jaxkv.policies.prompt_compression.expected_attention import ExpectedAttention
from jaxkv.policies.prompt_compression.keydiff import KeyDiff
from jaxkv.policies.prompt_compression.pyramidkv import PyramidKV
from jaxkv.policies.prompt_compression.retrieval import Retrieval
from jaxkv.policies.prompt_compression.rkv import RKV
from jaxkv.policies.prompt_compression.snapkv import SnapKV
from jaxkv.policies.prompt_compression.tova import TOVA
from jaxkv.policies.prompt_compression.triattention import TriAttention
from jaxkv.policies.prompt_compression.uniform import Uniform
from jaxkv.policies.prompt_compression.vase import VaSE
from jaxkv.policies.reservoir import Reservoir
from jaxkv.policies.sparse_attention.loki import Loki
from jaxkv.policies.sparse_attention.oracle import Oracle
from jaxkv.policies.sparse_attention.quest import Quest
from jaxkv.policies.sparse_attention.topk import TopK
from jaxkv.policies.sparse_attention.topp import TopP
from jaxkv.policies.sparse_attention.vattention import VAttention
from jaxkv.policies.streaming import Streaming
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
    "expected-attention": ExpectedAttention,
    "keydiff": KeyDiff,
    "retrieval": Retrieval,
    "tova": TOVA,
    "rkv": RKV,
    "vase": VaSE,
    "triattention": TriAttention,
    "magicpig": MagicPIG,
    "topk": TopK,
    "topp": TopP,
    "oracle": Oracle,
    "quest": Quest,
    "loki": Loki,
    "vattention": VAttention,
}

__all__ = ["POLICIES", *(kind.__name__ for kind in POLICIES.values())]
