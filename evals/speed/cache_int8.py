"""Caches in int8 on SmolLM2-135M-Instruct: bytes, loss and decoding speed against floats.

The loss is that of a novel, token by token in both forms; of `snapkv`, that of the second half of
each stretch, after the first half was compressed. Decoding continues from a prompt, and both forms
of all caches alternate in one process. `drift` streams random tokens through one small layer, and
compares each row that is stored at the end with its token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Chunk, Spec, State
from jaxkv.evals.lib.paired_losses import bin_means
from jaxkv.evals.lib.record import (
    Record,
    make_parser,
    read,
    run_command,
    spread,
    standard_error,
)
from jaxkv.evals.lib.state_sizes import prefilled_bytes
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.lib.timing import bar, decode_variant, prompt, ratio, time_rounds
from jaxkv.evals.lib.verdict import Statement, below, within
from jaxkv.models.generation.score import gather
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import Llm
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import rotary
from jaxkv.testing.int8 import HALF, parts_in_int8
from jaxkv.typing import Array, Float32, UInt32

POLICIES = {
    "streaming": "sinks=4,window=1020",
    "reservoir": "sinks=4,window=508,sample=512",
    "balance-stream": "sinks=4,window=892,levels=3,block=64",
    "snapkv": "capacity=512,start=1024",
}
# Caches whose bytes do not depend on the prompt; by default all have the same number of tokens.
BOUNDED = ("streaming", "reservoir", "balance-stream")
TOKENS = {name: 512 if name == "snapkv" else 1024 for name in POLICIES}
DEFAULT_TOKENS = 256
STREAMED = ("streaming:sinks=4,window=60", "reservoir:sinks=4,window=60,sample=64",
            "balance-stream:sinks=4,window=60,levels=3,block=32")  # fmt: skip
LAYER = Spec(1, 64, 64**-0.5, rotary(64, 10_000.0))
STRETCH = 2048  # tokens of a prompt and its continuation
PROMPT = 1024  # cached tokens when decoding is timed
CHUNK = 256


def main() -> None:
    parser = make_parser("jaxkv.evals.speed.cache_int8", __doc__)
    parser.add_argument("--text", type=Path, required=True, help="a novel")
    parser.add_argument("--tokens", type=int, default=20_000, help="to score")
    parser.add_argument("--stream", type=int, default=1_000_000, help="tokens to stream for drift")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small numbers, into out/")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.stream, options.rounds = 2 * STRETCH, 20_000, 3
    record = Record("cache_int8", [smollm2.fetch(), options.text], [0], quick=options.quick)
    llm = models.load(smollm2.NAME, "float32")
    ids, _ = tokens_of(llm, options.text, options.tokens)
    results = {
        "text": options.text.stem,
        "policies": POLICIES,
        "bytes": {name: shares(llm, name) for name in POLICIES},
        "bytes at default sizes": {name: default_shares(llm.spec, name) for name in BOUNDED},
        "loss": {name: losses(llm, name, ids) for name in POLICIES},
        "speed": speed(llm, options.rounds),
        "drift": {policy: drift(policy, options.stream) for policy in STREAMED},
    }
    results["bars"] = bars(results)
    record.finish(results)


def bars(results: dict[str, Any]) -> list[dict[str, object]]:
    lines = []
    for name in POLICIES:
        title = f"{name} with storage=int8 over floating point"
        loss = results["loss"][name]
        lines += [
            *byte_bars(title, TOKENS[name], results["bytes"][name]),
            *byte_bars(title, DEFAULT_TOKENS, results["bytes at default sizes"].get(name, {})),
            bar(f"{title}: loss, nats per token", loss["difference"], "<=", 0.002),
            bar(
                f"{title}: tokens per second, batch 1", results["speed"][name]["faster"], ">=", 0.95
            ),
        ]
    rows_off = max(drifted["rows_off"] for drifted in results["drift"].values())
    return [
        *lines,
        bar("rows that differ from their token by more than half a scale", rows_off, "<=", 0),
    ]


def byte_bars(title: str, tokens: int, share: dict[str, float]) -> list[dict[str, object]]:
    """Its bars at this many tokens. share: bytes in int8 over those in each dtype."""
    asks = {"float32": 0.27, "bfloat16": 0.53}
    name = f"{title}: bytes of {tokens:,} tokens, of "
    return [bar(name + dtype, share[dtype], "<=", asks[dtype]) for dtype in share]


def forms(name: str) -> dict[str, str]:
    """The policy strings of a cache in floats and in int8."""
    return {form: f"{name}:{POLICIES[name]},storage={form}" for form in ("float", "int8")}


def shares(llm: Llm, name: str) -> dict[str, float]:
    """Bytes of all layers in int8 over those in each dtype, after a prompt."""
    floats, int8 = forms(name).values()
    return {
        dtype: bytes_after_prompt(llm, int8, dtype) / bytes_after_prompt(llm, floats, dtype)
        for dtype in ("float32", "bfloat16")
    }


def default_shares(spec: Spec, name: str) -> dict[str, float]:
    """Bytes of a layer in int8 over those in each dtype, for a policy with its default sizes."""

    def count(dtype: str, form: str) -> int:
        policy = parse_policy(f"{name}:storage={form}")
        return policy.bytes_per_sequence(replace(spec, dtype=dtype))

    return {
        dtype: count(dtype, "int8") / count(dtype, "float") for dtype in ("float32", "bfloat16")
    }


def bytes_after_prompt(llm: Llm, policy: str, dtype: str) -> int:
    spec = replace(llm.spec, dtype=dtype)
    return sum(prefilled_bytes(layer, spec, PROMPT) for layer in llm.policies(policy))


def losses(llm: Llm, name: str, ids: Sequence[int]) -> dict[str, Any]:
    """The mean loss of each form, and that of int8 minus floats with its standard error."""
    by_form = {
        form: np.concatenate(list(losses_of(llm, policy, ids))).astype(np.float64)
        for form, policy in forms(name).items()
    }
    apart = by_form["int8"] - by_form["float"]
    return {
        "tokens": len(apart),
        "loss": {form: float(np.mean(values)) for form, values in by_form.items()},
        "difference": float(np.mean(apart)),
        "standard_error": standard_error(bin_means(apart)),
    }


def losses_of(llm: Llm, policy: str, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """The losses of a text, or of the second half of each of its stretches."""
    if parse_policy(policy).min_prompt is None:
        yield gather(models.losses(llm, ids, policy))[0]
        return
    for at in range(0, len(ids) - STRETCH + 1, STRETCH):
        first, second = ids[at : at + STRETCH // 2], ids[at + STRETCH // 2 : at + STRETCH]
        stream = models.Stream(llm, policy, tokens=STRETCH)
        stream.prefill([first])
        stream.finish_prefill()
        yield gather(models.losses(llm, second, chunk=CHUNK, stream=stream))[0]


def speed(llm: Llm, rounds: int, new: int = 32) -> dict[str, Any]:
    """Tokens a second of each cache in each form, and the ratio of both."""
    variants = {}
    for name in POLICIES:
        for form, policy in forms(name).items():
            stream = models.Stream(llm, policy, tokens=PROMPT + new)
            stream.prefill([prompt(llm, PROMPT + 1)])
            stream.finish_prefill()
            variants[f"{name}, {form}"] = decode_variant(stream, new)
    seconds = time_rounds(variants, rounds, "cache_int8")
    return {
        name: {
            "tokens_per_second": {
                form: spread(new / np.array(seconds[f"{name}, {form}"])) for form in forms(name)
            },
            "faster": ratio(seconds[f"{name}, float"], seconds[f"{name}, int8"]),
        }
        for name in POLICIES
    }


def drift(policy: str, tokens: int) -> dict[str, int]:
    """Stream random tokens, and count the stored rows that are not those of their tokens."""
    chosen = parse_policy(f"{policy},storage=int8")
    tokens -= tokens % CHUNK

    def step(state: State, first: Array) -> tuple[State, None]:
        positions = first + jnp.arange(CHUNK, dtype=jnp.uint32)[None]
        q, k, v = (leaf[:, :, None] for leaf in token_at(positions))
        chunk = Chunk(q, k, v, positions, jnp.ones_like(positions, bool))
        return chosen.update(LAYER, state, chunk)[1], None

    firsts = jnp.arange(0, tokens, CHUNK, dtype=jnp.uint32)
    start = chosen.init(LAYER, 1, jax.random.key(0))
    state = jax.jit(lambda state: jax.lax.scan(step, state, firsts)[0])(start)
    rows, off = 0, 0
    for part in parts_in_int8(state):
        positions = part.positions.reshape(1, -1)  # one KV head
        _, k, v = token_at(positions)
        k = LAYER.encoding.rotate(k[:, :, None], positions)[:, :, 0]
        for stored, expected in ((part.k, k), (part.v, v)):
            values, scale = (np.asarray(leaf[0, 0], np.float32) for leaf in stored)
            written = scale[:, 0] > 0
            is_off = np.abs(values * scale - np.asarray(expected[0])) > HALF * scale
            rows, off = rows + int(written.sum()), off + int((is_off.any(axis=1) & written).sum())
    return {"tokens": tokens, "rows": rows, "rows_off": off}


def token_at(positions: UInt32[Array, "B T"]) -> Float32[Array, "3 B T H"]:
    """Query, key and value of the tokens at these positions, which follow from the position."""
    draw = lambda at: jax.random.normal(jax.random.fold_in(jax.random.key(0), at), (3, 64))  # noqa: E731
    return jnp.moveaxis(jax.vmap(jax.vmap(draw))(positions), 2, 0)


def table() -> str:
    """Bytes, loss and speed of each cache in int8, over floats."""
    results = read("cache_int8")["results"]
    lines = table_head("policy", "cached tokens", "bytes over float32", "bytes over bfloat16",
                       "more loss (nats per token)", "times as fast")  # fmt: skip
    for name in POLICIES:
        size, loss = results["bytes"][name], results["loss"][name]
        lines.append(table_row(
            f"`{name}`", f"{TOKENS[name]:,}", f"{size['float32']:.3f}", f"{size['bfloat16']:.3f}",
            f"{loss['difference']:+.5f} ± {2 * loss['standard_error']:.5f}",
            ranged(results["speed"][name]["faster"], "median", ".2f"),
        ))  # fmt: skip
    return page_table(lines)


TABLES = {"cache_int8": table}
STATEMENTS = (
    Statement("docs/policies.md", "no cache loses more than 0.001 nats per token", "cache_int8",
              [within("loss/{policy}/difference", by=0.001)]),
    Statement("docs/policies.md", "saves memory and not time", "cache_int8",
              [below("bytes/{policy}/float32", 0.28),
               below("speed/{policy}/faster", 1, sure=False)]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
