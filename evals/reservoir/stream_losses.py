"""Samples of evicted tokens against a plain window of the same bytes, on a real model.

Every cache reads the beginnings of the same texts. Its loss is compared token by token with that of
`streaming`, whose window is as long as the bytes of the largest sampled cache allow. A weighted
sample counts each token for all n evicted tokens that it represents, or for a power of n. Absolute
positions stay within the trained context, because only a beginning is read with them. The number of
cached tokens is a mean over steps, because a merge-and-reduce tree fills and empties its levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.evals.lib.paired_losses import (
    BIN,
    TOKENS,
    Case,
    compare,
    measure_cases,
    record_header,
    texts_of,
)
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, run
from jaxkv.evals.lib.state_sizes import sequence_bytes, streaming, streaming_window
from jaxkv.evals.lib.table import over_base, table
from jaxkv.evals.lib.verdict import Results, Statement, above, below, claim, within
from jaxkv.models.loading.llm import Llm
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import NoPosition

ENDS = "sinks=4,window=124"
BEGINNING = 8_000  # tokens read of each text where positions are absolute or samples weighted
H2O = 2_000  # tokens read under h2o, which takes one token at a time
SAMPLED = {
    "reservoir": f"reservoir:{ENDS},sample=128",
    "reservoir, geometric": f"reservoir:{ENDS},sample=128,scheme=geometric",
    "stratified": f"stratified:{ENDS},sample=128",
    "balance-stream": f"balance-stream:{ENDS},levels=3,block=64",
    "balance-stream, 1 level": f"balance-stream:{ENDS},levels=1,block=128",
}
VARIANTS = {  # of those above: fields added
    "weighted": "weighted=true",
    "weighted by n^0.5": "weighted=true,exponent=0.5",
    "weighted by n^0.25": "weighted=true,exponent=0.25",
    "absolute": "positions=absolute",
    "weighted, absolute": "weighted=true,positions=absolute",
}
BASE = "streaming"
SKIP = 2 * BIN  # tokens until every cache evicts


def cases(llm: Llm) -> dict[str, Case]:
    """All caches, at the bytes of the largest sampled one; `window` and `h2o` at its tokens."""
    window = streaming_window(llm, SAMPLED.values())
    by_name = {BASE: Case(streaming(window)), "window": Case(f"window:window={4 + window}")}
    by_name |= {name: Case(policy) for name, policy in SAMPLED.items()}
    by_name[f"{BASE}, absolute"] = Case(f"{streaming(window)},positions=absolute", tokens=BEGINNING)
    for name in ("reservoir", "stratified", "balance-stream"):
        for variant, fields in VARIANTS.items():
            by_name[f"{name}, {variant}"] = Case(f"{SAMPLED[name]},{fields}", tokens=BEGINNING)
    half = (4 + window) // 2
    return by_name | {"h2o": Case(f"h2o:heavy={half},window={half}", tokens=H2O)}


def measure(run: Run) -> dict[str, Any]:
    """All caches on all texts: losses beyond the size of the cache, bytes and cached tokens."""
    llm = run.llm
    caches = cases(llm)
    cached = cached_tokens(caches)
    by_text = measure_cases(llm, texts_of(run), caches, BASE, run.record)
    rows = {}
    for name, case in caches.items():
        compared = compare(by_text, [BASE, name], BASE, SKIP)  # read to the same end
        rows[name] = compared["rows"][name] | {
            "tokens": compared["tokens"],
            "policy": case.policy,
            "state_bytes": sequence_bytes(llm, case.policy),
            "cached": cached[name],
        }
    return record_header(llm, caches, by_text) | {"rows": rows}


def cached_tokens(caches: Mapping[str, Case]) -> dict[str, float]:
    """The mean number of cached tokens of each cache."""
    with jax.default_device(jax.devices("cpu")[0]):  # steps too small for an accelerator
        return {name: mean_cached(parse_policy(case.policy)) for name, case in caches.items()}


def mean_cached(policy: Policy, tokens: int = 16_384, chunk: int = 64) -> float:
    """Mean number of cached tokens per KV head after each chunk of the second half of `tokens`.

    The cached tokens of these policies do not depend on keys, except under h2o.
    """
    spec = Spec(kv_heads=1, head_dim=4, scale=0.5, encoding=NoPosition())
    state = policy.init(spec, 1, jax.random.key(0))
    zeros = jnp.zeros((1, chunk, 1, 4), jnp.float32)

    @jax.jit
    def update(state: Any, start: jax.Array) -> tuple[Any, jax.Array]:
        positions = start + jnp.arange(chunk, dtype=jnp.uint32)[None]
        valid = jnp.ones((1, chunk), bool)
        _, state = policy.update(spec, state, Chunk(zeros, zeros, zeros, positions, valid))
        return state, jnp.sum(policy.cached(spec, state).log_weight > -jnp.inf)

    counts = []
    for start in range(0, tokens, chunk):
        state, count = update(state, jnp.uint32(start))
        counts.append(int(count))
    return float(np.mean(counts[len(counts) // 2 :]))


MEASURE = Measure("stream_losses", measure, [TOKENS], model=SMOLLM2, texts=1)
WEIGHTED = ("reservoir", "stratified", "balance-stream")  # with every variant
SAME = 0.02  # nats: a smaller difference counts as none


def over_unweighted(results: Results, weighted: str = "", plain: str = "") -> dict[str, Any]:
    """The loss with weights minus that without, on the same tokens.

    weighted, plain: what follows in the names of the cases.
    """
    rows = {}
    for name in WEIGHTED:
        case, base = f"{name}, weighted{weighted}", f"{name}{plain}"
        rows[name] = compare(results["by_text"], [base, case], base, SKIP)["rows"][case]
    return rows


CLAIMS = (
    claim("not claimed", "Reservoir sampling has a lower loss than StreamingLLM of equal bytes",
          "stream_losses", below("rows/reservoir")),
    claim("not claimed", "Weights that make a sample unbiased lower the loss", "stream_losses",
          below(over_unweighted)),
)  # fmt: skip


def losses_table() -> str:
    """Loss of caches of equal bytes, minus that of streaming."""
    rows = read("stream_losses")["results"]["rows"]
    heads = ("cache", "tokens cached", "tokens read of each novel", "loss minus streaming's")
    return table(heads, (
        (f"`{name}`", f"{row['cached']:.0f}", f"{row['tokens'][1]:,}", over_base(row))
        for name in ("window", *SAMPLED, "h2o") for row in [rows[name]]
    ))  # fmt: skip


def weights_table() -> str:
    """Loss minus that of streaming by weight of a token that represents n, on the same tokens."""
    by_text = read("stream_losses")["results"]["by_text"]
    variants = ("weighted by n^0.25", "weighted by n^0.5", "weighted", "absolute",
                "weighted, absolute")  # fmt: skip
    cells = []
    for name in WEIGHTED:
        names = [name, *(f"{name}, {variant}" for variant in variants)]
        rows = compare(by_text, [BASE, *names], BASE, SKIP)["rows"]
        cells.append((f"`{name}`", *(over_base(rows[case]) for case in names)))
    heads = ("cache", "1", "n^0.25", "n^0.5", "n", "1, positions absolute", "n, positions absolute")
    return table(heads, cells)


TABLES = {"sample_losses": losses_table, "sample_weights": weights_table}
PAGE, NEGATIVE, WHICH = "docs/results/reservoir.md", "evals/NEGATIVE.md", "docs/which_cache.md"
HIGHER = [above(f"rows/{name}") for name in WEIGHTED]
WORSE_WITH_WEIGHTS = [above(over_unweighted, 0.2)]
STATEMENTS = (
    Statement(PAGE, "a longer window predicts the next token better than a sample", "stream_losses",
              HIGHER),
    Statement(PAGE, "It loses no more than `streaming`", "stream_losses",
              [within("rows/reservoir, geometric", by=0.005)]),
    Statement(PAGE, "Full weights cost over 0.2 nats", "stream_losses", WORSE_WITH_WEIGHTS),
    Statement(NEGATIVE, "A window of as many bytes predicts the next token better than a shorter "
              "window and a sample", "stream_losses", HIGHER),
    Statement(NEGATIVE, "the loss rises by over 0.2 nats per token", "stream_losses",
              WORSE_WITH_WEIGHTS),
    Statement(NEGATIVE, "within 0.02 nats of the loss without weights", "stream_losses",
              [within(lambda results: over_unweighted(results, " by n^0.25"), by=SAME)]),
    Statement(NEGATIVE, "With absolute positions weights still cost over 0.05 nats",
              "stream_losses",
              [above(lambda results: over_unweighted(results, ", absolute", ", absolute"), 0.05)]),
    Statement(WHICH, "Its next-token loss is higher than that of `streaming`", "stream_losses",
              HIGHER),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
