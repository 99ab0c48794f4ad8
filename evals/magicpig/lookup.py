"""Time of MagicPIG's attention by hash tables, compared with the best dense form.

One KV head with four query heads, d = 128, K = 10, L = 150, float32. Keys have random directions in
a subspace of 88 dimensions, which gives the shares of Table 8, and a common offset. All variants
alternate in one process; a round decodes some tokens, each with its own queries. The bytes that a
token reads are counted as well: the sampled keys and values, the blocks of the buckets, the counts,
the planes, the unindexed tail, the first and the newest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk, Spec
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar, ratio, time_rounds, timed
from jaxkv.evals.lib.verdict import above, claim
from jaxkv.policies import MagicPIG
from jaxkv.policies.magicpig import hash_tables, lsh
from jaxkv.policies.magicpig import policy as magicpig
from jaxkv.policies.magicpig.index import IndexState
from jaxkv.rotary import NoPosition

GROUP, DIM, DIMS = 4, 128, 88
TURN = 32  # tokens decoded per round
POLICY = MagicPIG(K=10, L=150, sinks=4, window=64)
FASTER = {131_072: 3.0, 32_768: 2.0}  # bar: minimal speed over dense attention
READ = 0.12  # bar: maximal bytes over dense attention
SPEC = Spec(kv_heads=1, head_dim=DIM, scale=DIM**-0.5, encoding=NoPosition())


class Form(NamedTuple):
    """One way to attend with q [1,G,H], and the arrays that it reads."""

    attend: Callable[..., jax.Array]
    arrays: tuple[Any, ...]


FLAGS = (
    flag("--tokens", tuple(sorted(FASTER)), "of the prompt", minimum=256),
    flag("--rounds", 31, "of each time", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """Times and bytes of all sizes, and their bars; 4,096 tokens if --quick is given."""
    lengths = [4096] if run.options.quick else run.options.tokens
    sizes = {tokens: measure_size(tokens, run.options.rounds) for tokens in lengths}
    bars = [
        (bar(f"attention by tables: times faster than dense, {tokens:,} tokens",
             row["times_faster"], ">=", FASTER[tokens]),
         bar(f"bytes read per token over dense, {tokens:,} tokens", row["share_read"], "<=", READ))
        for tokens, row in sizes.items() if tokens in FASTER
    ]  # fmt: skip
    return {
        "policy": {"K": POLICY.K, "L": POLICY.L, "budget": POLICY.budget}, "group": GROUP,
        "head_dim": DIM, "sizes": sizes, "bars": [line for pair in bars for line in pair],
    }  # fmt: skip


def measure_size(tokens: int, count: int) -> dict[str, Any]:
    """Times and bytes of one size."""
    prompt, queries = draw(tokens)
    reading = absorb(POLICY.reserve(SPEC, begin(), tokens), prompt)
    finish = jax.jit(POLICY.finish_prefill, static_argnums=0)
    state = finish(SPEC, reading)
    forms = {"tables": Form(lambda q, state: attend(state, q, tokens), (state,)),
             **dense_forms(prompt)}  # fmt: skip
    turns = {name: jax.jit(partial(decode_tokens, form.attend)) for name, form in forms.items()}
    outs = {name: np.asarray(turns[name](queries, *form.arrays)) for name, form in forms.items()}
    dense = outs["dense, keys as rows"]
    for name in forms.keys() - {"tables"}:
        np.testing.assert_allclose(outs[name], dense, atol=1e-4, err_msg=name)
    work = {
        name: partial(lambda name, form: turns[name](queries, *form.arrays).block_until_ready(),
                      name, form)
        for name, form in forms.items()
    }  # fmt: skip
    seconds = time_rounds(
        {name: timed(attention) for name, attention in work.items()}, count, f"{tokens:,} tokens"
    )
    seconds = {name: np.array(took) / TURN for name, took in seconds.items()}
    best = min(forms.keys() - {"tables"}, key=lambda name: np.median(seconds[name]))
    room = state.dense.positions.shape[1] - POLICY.sinks - POLICY.window
    filled = absorb(state, draw(room)[0])
    making = time_rounds(
        {
            "build": timed(lambda: jax.block_until_ready(finish(SPEC, reading))),
            "rebuild": timed(lambda: jax.block_until_ready(POLICY.reserve(SPEC, filled, room + 1))),
        }, 3, "making tables",
    )  # fmt: skip
    again = POLICY.reserve(SPEC, filled, room + 1)
    hashed_keys = [int(index_state.indexed.count[0]) for index_state in (state, again)]
    selected = [
        magicpig.find(state, POLICY.settings, POLICY.budget, q, *where(tokens)) for q in queries
    ]
    query_bytes = [
        bytes_read(state, *query_places) for query_places in zip(queries, selected, strict=True)
    ]
    read = {
        part: float(np.mean([arrays[part] for arrays in query_bytes])) for part in query_bytes[0]
    }
    dense_bytes = 2 * 4 * tokens * DIM
    return {
        "milliseconds": {name: spread(1e3 * took) for name, took in seconds.items()},
        "best_dense": best,
        "times_faster": ratio(seconds[best], seconds["tables"]),
        "error": float(np.linalg.norm(outs["tables"] - dense) / np.linalg.norm(dense)),
        "share_attended": float(np.mean([places.total for places in selected])) / tokens,
        "bytes_read": read,
        "dense_bytes": dense_bytes,
        "share_read": sum(read.values()) / dense_bytes,
        "table_bytes": sum(leaf.nbytes for leaf in state.tables),
        "cache_bytes": 2 * 4 * tokens * DIM,
        "keys_in_tables": hashed_keys,
        "seconds_to_make_tables": spread(making["build"]),
        "seconds_to_rebuild_tables": spread(making["rebuild"]),
    }  # fmt: skip


def draw(tokens: int) -> tuple[Chunk, jax.Array]:
    """A prompt of random keys, and queries [TURN,1,G,H] for the tokens of a round."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(DIM, DIMS)))[0].T
    offset = 6 * rng.normal(size=DIM) / DIM**0.5
    k = rng.normal(size=(1, tokens, 1, DIMS)) @ basis + offset
    v = rng.normal(size=(1, tokens, 1, DIM)) + 1
    q = rng.normal(size=(TURN, 1, GROUP, DIMS)) @ basis
    k, v, q = (jnp.asarray(a, jnp.float32) for a in (k, v, q))
    none = jnp.zeros((1, tokens, GROUP, DIM), jnp.float32)
    positions = jnp.arange(tokens, dtype=jnp.uint32)[None]
    return Chunk(none, k, v, positions, jnp.ones((1, tokens), bool)), q


@jax.jit
def absorb(state: IndexState, tokens: Chunk) -> IndexState:
    """The state after these tokens."""
    return POLICY.update(SPEC, state, tokens)[1]


def begin() -> IndexState:
    return POLICY.init(SPEC, 1, jax.random.key(0))


def where(tokens: int) -> tuple[jax.Array, jax.Array]:
    """The number and position of the querying token."""
    return jnp.full((1,), tokens, jnp.int32), jnp.full((1,), tokens, jnp.uint32)


def attend(state: IndexState, q: jax.Array, tokens: int) -> jax.Array:
    """The policy's attention for one token, without writing it to the cache."""
    number, position = where(tokens)
    return POLICY.attend_after_prefill(
        SPEC, state, q[:, None], number[:, None], position[:, None]
    ).out[:, 0]


def decode_tokens(form: Callable[..., jax.Array], queries: jax.Array, *arrays: Any) -> jax.Array:
    """Attention of one token after another in one program, as in decoding."""
    return jax.lax.map(lambda q: form(q, *arrays), queries)


def dense_forms(prompt: Chunk) -> dict[str, Form]:
    """Attention of q [1,G,H] to all keys, in several forms; which is fastest depends on the CPU."""
    k, v = prompt.k[0, :, 0], prompt.v[0, :, 0]
    transposed = jax.block_until_ready(jnp.array(k.T, copy=True))
    high = jax.lax.Precision.HIGHEST
    dot = lambda a, b: jnp.dot(a, b, precision=high)
    scale = np.float32(SPEC.scale)

    def blend(logits: jax.Array, v: jax.Array) -> jax.Array:
        return dot(jax.nn.softmax(logits * scale, axis=-1), v)

    forms = {
        "dense, keys as rows": (k, lambda q, k, v: blend(dot(q, k.T), v)),
        "dense, keys as columns": (transposed, lambda q, k, v: blend(dot(q, k), v)),
        "dense, keys first": (k, lambda q, k, v: blend(dot(k, q.T).T, v)),
        "dense, values first": (k, lambda q, k, v: dot(
            v.T, jax.nn.softmax(dot(k, q.T) * scale, axis=0)).T),
        "dense, heads apart": (k, lambda q, k, v: jax.lax.map(
            lambda head: blend(dot(head[None], k.T), v)[0], q)),
    }  # fmt: skip
    return {
        name: Form(lambda q, k, v, form=form: form(q[0], k, v)[None], (keys, v))
        for name, (keys, form) in forms.items()
    }


def bytes_read(
    state: IndexState, q: jax.Array, selected: hash_tables.SampledPlaces
) -> dict[str, int]:
    """Bytes that one token reads, by array: the sum over query heads, planes once."""
    codes = lsh.codes(q.reshape(1, GROUP, DIM), state.planes[0], POLICY.settings.hashing)[0].T
    first = np.asarray(state.tables.first)[0, 0]
    attended = [first[np.arange(POLICY.L), code + 1] - first[np.arange(POLICY.L), code]
           for code in np.asarray(codes)]  # fmt: skip
    entries = state.tables.entries
    block = entries.shape[4] * entries.dtype.itemsize
    places = state.indexed.positions.shape[1] + state.tail_codes.shape[3]
    rows = int(np.sum(selected.count))
    # The codes of the unindexed tail are compared in whole blocks.
    tail = int(state.dense.count[0]) - POLICY.sinks - POLICY.window + 1
    tail = -(-tail // hash_tables.COMPARED) * hash_tables.COMPARED
    return {
        "rows": rows * (2 * 4 * DIM + 4),  # and their norms
        "buckets": int(np.sum(attended)) * block + GROUP * POLICY.L * 8,
        "tallies": GROUP * places * 9 // 4,  # one byte and one bit per key, written and read
        "planes": state.planes.nbytes,
        "tail": GROUP * POLICY.L * tail * state.tail_codes.dtype.itemsize,
        "ends": (POLICY.sinks + POLICY.window) * 2 * 4 * DIM,
    }


MEASURE = Measure("lookup", measure, FLAGS)
CLAIMS = (
    claim("1.5 to 5 times the throughput, caches on a CPU",
          "Attention of one KV head by hash tables is over 1.5 times as fast as the best dense "
          "form on a CPU, by tokens", "lookup",
          above("sizes/{tokens}/times_faster", 1.5), unit="times"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
