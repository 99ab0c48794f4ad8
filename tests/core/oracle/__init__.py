"""Every policy by its definition, in float64 numpy, one token at a time. It imports no jaxkv.

A token's number is its index in the sequence. A rule takes the `Inputs` of one KV head. For each
token it yields (view, cached): lists of (number, log weight), oldest token first.
- view: the tokens that the query attends to. An entry may have a third item, a factor of the value.
- cached: the tokens in the cache after this step.
- A third list is yielded where cache-relative positions have gaps: the position of each token in
  view.

theta: a rotary base, or frequencies and an amplitude (`yarn`). None: no rotation.
"""

from tests.core.oracle.attended import (
    attended_by_centres,
    attended_by_newest,
    attended_without_like,
    large_and_drawn,
    score_by_centres,
    score_without_like,
)
from tests.core.oracle.draws import priority
from tests.core.oracle.evicting import full, heavy_hitters, reservoir, streaming, window
from tests.core.oracle.halving import by_coin, by_pairs, by_walk
from tests.core.oracle.int8 import in_int8, stored_in_int8
from tests.core.oracle.layer import attention, softmax_attention
from tests.core.oracle.merge_reduce import merge_and_reduce
from tests.core.oracle.positions import rotate, rotate_heads, yarn
from tests.core.oracle.prompt_compression import (
    as_published,
    at_random,
    best_of_competing,
    compressed,
    in_blocks,
    least_alike,
    least_alike_of_heads,
    most_attended,
    most_expected,
    repeated,
    repeated_of_heads,
    repeated_of_layer,
    score_attended,
    unlike,
)
from tests.core.oracle.sparse import (
    by_weight,
    in_buckets,
    in_components,
    of_largest,
    of_mass,
    of_pages,
    sparse_attention,
    verified,
)

__all__ = [
    "as_published",
    "at_random",
    "attended_by_centres",
    "attended_by_newest",
    "attended_without_like",
    "attention",
    "best_of_competing",
    "by_coin",
    "by_pairs",
    "by_walk",
    "by_weight",
    "compressed",
    "full",
    "heavy_hitters",
    "in_blocks",
    "in_buckets",
    "in_components",
    "in_int8",
    "large_and_drawn",
    "least_alike",
    "least_alike_of_heads",
    "merge_and_reduce",
    "most_attended",
    "most_expected",
    "of_largest",
    "of_mass",
    "of_pages",
    "priority",
    "repeated",
    "repeated_of_heads",
    "repeated_of_layer",
    "reservoir",
    "rotate",
    "rotate_heads",
    "score_attended",
    "score_by_centres",
    "score_without_like",
    "softmax_attention",
    "sparse_attention",
    "stored_in_int8",
    "streaming",
    "unlike",
    "verified",
    "window",
    "yarn",
]
