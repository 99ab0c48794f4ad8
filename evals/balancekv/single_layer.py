"""Distance of attention to a compressed cache from full attention (BalanceKV, Figure 3).

A model reads stretches of text, by default as long as its trained context, and the queries, keys
and values of some layers are recorded. The cache of each layer is then compressed like a prompt:
the first and last tokens stay exact, and one in 2^T of the tokens between stays. The error is the
distance of the next tokens' attention from full attention, divided by the norm of full attention
and averaged over query heads and stretches. These tokens also attend to each other. saturated: the
share of a walk's steps with a certain sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.evals.lib.record import read, spread, standard_error
from jaxkv.evals.lib.run import DEFAULT as OURS
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Results, Statement, above, below, claim
from jaxkv.evals.magicpig import heads
from jaxkv.evals.magicpig.heads import QUERIES
from jaxkv.policies.discrepancy import Halving, halve
from jaxkv.policy_spec import parse_policy
from jaxkv.typing import Bool, Float32

ENDS = 64  # tokens at each end
BLOCK = 256  # tokens that `balance` halves together
WINDOW = 32  # of SnapKV: the queries whose attention it uses
METHODS = {  # names in tables and plots; `rounds` is added
    "balance, walk": "balance:mode=walk",
    "balance, pairs": "balance:mode=pairs",
    "balance, walk at temperature 1": "balance:mode=walk,key_scale=1",
    "balance, near the published code": "balance:mode=walk,c=0,weights=published",
    "stratified": "balance:mode=coin",
    "uniform, weighted": "uniform:weighted=true",
    "uniform": "uniform:weighted=false",
}


FLAGS = (
    *heads.FLAGS,
    flag("--rounds", (1, 2, 3, 4), "T"),
    flag("--seeds", 10, minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """The errors of every method in some layers."""
    llm, options = run.llm, run.options
    captured = heads.captured_layers(run, after=QUERIES, minimum=2 * ENDS + BLOCK)
    tokens = next(iter(captured.values())).k.shape[1] - QUERIES
    errors_by_stretch = [
        {
            str(number): errors(
                llm.spec, *(a[stretch] for a in layer), options.rounds,
                # Every layer and stretch has its own seeds.
                [seed + options.seeds * (number + llm.config.layers * stretch)
                 for seed in range(options.seeds)],
                f"stretch {stretch + 1} of {options.stretches}, layer {number}",
            )
            for number, layer in captured.items()
        }
        for stretch in range(options.stretches)
    ]  # fmt: skip
    layers = jax.tree.map(
        lambda *by_stretch: np.mean(by_stretch, axis=0).tolist(),
        *errors_by_stretch,
        is_leaf=lambda x: isinstance(x, list),
    )
    return {
        "model": llm.name, "tokens": tokens, "stretches": options.stretches,
        "texts": len(options.text), "context": llm.config.context, "ends": ENDS,
        "rounds": options.rounds, "layers": layers,
        "summary": summary(layers, options.rounds),
        "by_stretch": by_stretch(errors_by_stretch, options.rounds),
        "saturated": {mode: np.mean([layer["saturated"][mode] for layer in layers.values()])
                      for mode in ("walk", "pairs")},
    }  # fmt: skip


def errors(
    spec: Spec, q: Any, k: Any, v: Any, rounds: Sequence[int], seeds: Sequence[int], title: str
) -> dict[str, Any]:
    """By method and T, the relative error of every seed."""
    exact = attend(spec, q, k, v, parse_policy("full"))
    if not np.isfinite(exact).all():
        raise SystemExit(f"{title}: full attention is not finite; nothing is compared")
    by_method: dict[str, Any] = {}
    for name, text in METHODS.items():
        by_method[name] = {}
        for number in rounds:
            chosen = parse_policy(f"{text},rounds={number},sinks={ENDS},window={ENDS}")
            by_seed = [relative_error(attend(spec, q, k, v, chosen, seed), exact) for seed in seeds]
            by_method[name][str(number)] = by_seed
            print(f"{title}, T={number}, {name}: {np.mean(by_seed):.4f}", flush=True)
    by_method["saturated"] = {
        mode: saturated(spec, k, v, Halving(mode), seeds) for mode in ("walk", "pairs")
    }
    alone = relative_error(attend(spec, q, k, v, parse_policy("full"), between=False), exact)
    by_method["ends alone"] = {str(number): [alone] for number in rounds}
    by_method["snapkv"] = {}
    for number in rounds:
        capacity = 2 * ENDS + (len(k) - QUERIES - 2 * ENDS) // 2**number
        chosen = parse_policy(f"snapkv:capacity={capacity},window={WINDOW}")
        by_method["snapkv"][str(number)] = [relative_error(attend(spec, q, k, v, chosen), exact)]
    return by_method


def attend(
    spec: Spec, q: Any, k: Any, v: Any, chosen: Policy, seed: int = 0, between: bool = True
) -> np.ndarray:
    """The output of the last tokens when `chosen` has cached the tokens before them.

    between: whether the tokens between the ends are valid.
    """
    valid = np.ones(len(k), bool)
    valid[ENDS : len(k) - QUERIES - ENDS] = between
    arrays = map(jnp.asarray, (q, k, v, valid))
    return np.asarray(_attend(chosen, spec, *arrays, jnp.uint32(seed)))


@partial(jax.jit, static_argnums=(0, 1))
def _attend(
    chosen: Policy, spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array,
    seed: jax.Array,
) -> Float32[jax.Array, "T N H"]:  # fmt: skip
    tokens = len(k) - QUERIES
    positions = jnp.arange(len(k), dtype=jnp.uint32)
    prompt, after = (
        Chunk(*(a[None, part] for a in (q, k, v, positions, valid)))
        for part in (slice(tokens), slice(tokens, None))
    )
    state = chosen.init(spec, 1, jax.random.key(seed))
    _, state = chosen.update(spec, chosen.reserve(spec, state, len(k)), prompt)
    if chosen.min_prompt is not None:
        state = chosen.reserve(spec, chosen.finish_prefill(spec, state), QUERIES)
    return chosen.update(spec, state, after)[0].out[0]


def saturated(spec: Spec, k: Any, v: Any, how: Halving, seeds: Sequence[int]) -> float:
    """The share of the first round's steps with a certain sign."""
    between = slice(ENDS, ENDS + (len(k) - QUERIES - 2 * ENDS) // BLOCK * BLOCK)
    at = jnp.arange(len(k), dtype=jnp.uint32)[None]
    rotated = spec.encoding.rotate(jnp.asarray(k)[None], at)[0]
    split = lambda a: jnp.moveaxis(a[between], 1, 0).reshape(a.shape[1], -1, BLOCK, a.shape[2])
    keys, values = split(rotated), split(jnp.asarray(v))
    run = jax.jit(partial(halve, how, spec.scale))
    steps_of = [run(keys, values, jax.random.uniform(jax.random.key(s), keys.shape[:3])).inner
           for s in seeds]  # fmt: skip
    return float(np.mean([certain(steps) for steps in steps_of]))


def certain(inner: Float32[jax.Array, "..."]) -> Bool[jax.Array, "..."]:
    """Steps whose sign no draw could change; a NaN gives -1 for any draw."""
    return ~(jnp.abs(inner) <= 0.5)


def relative_error(estimate: np.ndarray, exact: np.ndarray) -> float:
    """|estimate - exact| / |exact| of each query head; the mean over heads."""
    norm = lambda a: np.sqrt((a.astype(np.float64) ** 2).sum(axis=(0, 2)))
    return float((norm(estimate - exact) / norm(exact)).mean())


def summary(layers: dict[str, Any], rounds: Sequence[int]) -> dict[str, Any]:
    """The spread over seeds of each method's error, in the mean over layers."""
    return {
        name: {
            str(number): spread(np.mean([layer[name][str(number)] for layer in layers.values()], 0))
            for number in rounds
        }
        for name in methods(layers)
    }


def by_stretch(stretches: Sequence[dict[str, Any]], rounds: Sequence[int]) -> dict[str, Any]:
    """Each method's error in every stretch of the text, the mean over layers and seeds."""
    return {
        name: {
            str(number): [
                np.mean([layer[name][str(number)] for layer in layers.values()])
                for layers in stretches
            ]
            for number in rounds
        }
        for name in methods(stretches[0])
    }


def methods(layers: dict[str, Any]) -> list[str]:
    return [name for name in next(iter(layers.values())) if name != "saturated"]


MEASURE = Measure("single_layer", measure, FLAGS, model=OURS)
DEFAULT, REAL = "single_layer", "single_layer_135m"  # records: the default model, SmolLM2-135M
UNBALANCED = ("uniform, weighted", "uniform", "stratified")
CLAIMS = (
    *(claim("Figure 3, Llama-3.1-8B and Ministral-8B",
            "At equal budgets, balanced tokens (walk) have a lower attention error than uniform "
            "samples, with weights or without, and than stratified ones", record,
            *(below("by_stretch/balance, walk/{rounds}", f"by_stretch/{name}/{{rounds}}")
              for name in UNBALANCED), unit="error")
      for record in (DEFAULT, REAL)),
    claim("Table 1, LongBench-E, 25 %: 44.99 against 42.51, 44.57, 44.03, 44.82",
          "End to end BalanceKV beats StreamingLLM, SnapKV, PyramidKV and uniform sampling", "",
          needs="an 8B model and LongBench"),
)  # fmt: skip


def layers_below_uniform(results: Results) -> dict[str, float]:
    """By rounds, the share of layers in which the walk has less error than uniform samples."""
    return {
        rounds: mean(
            mean(layer["balance, walk"][rounds])
            < min(mean(layer[name][rounds]) for name in ("uniform, weighted", "uniform"))
            for layer in results["layers"].values()
        )
        for rounds in map(str, results["rounds"])
    }


def errors_table(record: str) -> str:
    """The error by the share of the tokens that is cached, with two standard errors."""
    results = read(record)["results"]
    heads = ("method", *(f"one of {2**number}" for number in results["rounds"]))
    return table(heads, (
        (name, *(f"{mean(x):.3f} ± {2 * standard_error(x):.3f}" for x in by_rounds.values()))
        for name, by_rounds in results["by_stretch"].items()
    ))  # fmt: skip


TABLES = {f"balance_error{name.removeprefix(DEFAULT)}": partial(errors_table, name)
          for name in (DEFAULT, REAL)}  # fmt: skip


def differs(record: str, says: str, *pairs: tuple[str, str, str]) -> Statement:
    """A sentence of the page: with so many rounds, the first method has a lower error."""
    comparisons = [
        below(f"by_stretch/{method}/{rounds}", f"by_stretch/{baseline}/{rounds}")
        for rounds, method, baseline in pairs
    ]
    return Statement("docs/results/balancekv.md", says, record, comparisons)


STATEMENTS = (
    differs(DEFAULT, "weights raise the error of uniform samples below a half",
            *((rounds, "uniform", "uniform, weighted") for rounds in "234")),
    differs(REAL, "In SmolLM2-135M weights lower the error of uniform samples at every size",
            *((rounds, "uniform, weighted", "uniform") for rounds in "123")),
    *(differs(record, "balancing lowers the error of weighted samples at every size",
              *((rounds, "balance, pairs", "uniform, weighted") for rounds in all_rounds))
      for record, all_rounds in ((DEFAULT, "1234"), (REAL, "123"))),
    differs(REAL, "`snapkv` has the lowest error there",
            *((rounds, "snapkv", name) for name in METHODS for rounds in "123")),
    Statement("docs/results/balancekv.md", "in over three quarters of its layers", REAL,
              [above(layers_below_uniform, 0.75)]),
    Statement("docs/results/balancekv.md", "fewer than a fifth of its steps", REAL,
              [below("saturated/{mode}", 0.2)]),
    Statement("evals/NEGATIVE.md", "balanced pairs have a lower error than all unbalanced samples",
              DEFAULT, [below(f"by_stretch/balance, pairs/{rounds}", f"by_stretch/{name}/{rounds}")
                        for name in UNBALANCED for rounds in (1, 2)]),
    Statement("evals/NEGATIVE.md", "Every method has a lower mean error than the ends alone", REAL,
              [below(f"by_stretch/{name}/{rounds}", f"by_stretch/ends alone/{rounds}")
               for name in (*METHODS, "snapkv") for rounds in (1, 2, 3)]),
    Statement("evals/NEGATIVE.md", "every weighted method has a higher error than the ends alone",
              DEFAULT,
              [above(f"by_stretch/{name}/4", "by_stretch/ends alone/4") for name in METHODS
               if name != "uniform"]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
