"""Losses of sparse attention after prompts of a real model, at equal shares of the keys.

The beginning of each text is a prompt, which all methods read once, because all of them attend
exactly until the end of prefill. The tokens after it are scored by teacher forcing; their queries
attend to both ends of the prompt and to a share of the keys between. K and L of MagicPIG and the
mass of top-p are chosen on the tokens of the same texts after those. Parts are kept under out/, so
that an interrupted run continues.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.cli.progress import show_progress
from jaxkv.contract import Policy
from jaxkv.errors import UserError
from jaxkv.evals.lib.paired_losses import excess
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.text import first_tokens
from jaxkv.evals.lib.verdict import Results, above, below, claim
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.evals.magicpig.heads import capture
from jaxkv.evals.magicpig.matched_budgets import DRAWING, CosineHistogram, EndsOnly, Masses
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import measurement
from jaxkv.policies import Full, MagicPIG
from jaxkv.policy_spec import format_policy
from jaxkv.typing import Float

PROMPT, SCORED = 2_048, 256  # tokens
SHARES = (0.02, 0.05, 0.1, 0.2)
SINKS, WINDOW = 4, 16
ANGLES = 4  # texts on which K, L and the mass are chosen
EVERY = 16  # of the queries by which K, L and the mass are chosen
COLUMNS = ("loss", "kl", "agreement", "read", "bytes")  # of a method, by text
FULL, ENDS = "full", "ends alone"  # methods besides those of a share
FLAGS = (
    flag("--prompt", PROMPT, "tokens", minimum=SINKS + WINDOW + 1),
    flag("--scored", SCORED, "tokens after the prompt", minimum=1),
    flag("--shares", SHARES, minimum=1e-9),
    flag("--seeds", 1, "of methods that draw", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """By share and method, the loss minus that of full attention, and what it costs."""
    llm, options = run.llm, run.options
    prompt, size = options.prompt, options.prompt + options.scored + 1
    if max(options.shares) > 1:
        raise UserError(f"--shares must be at most 1, got {options.shares}; try 0.05")
    novels = first_tokens(llm, options.texts, 2 * size)
    hash_ = zlib.crc32(np.array([*novels.values()], np.int32).tobytes())
    parts = Parts(run.record, 2 + len(options.shares) * options.seeds * len(novels))
    key = f"{llm.name}, prompt {prompt}, {hash_:x}"
    after = [ids[size:] for ids in novels.values()][:ANGLES]
    angles, masses = chosen_on(llm, after, prompt, parts, key)
    lines: dict[str, dict[str, Any]] = {}
    for share in options.shares:
        tables, mass = matched_budgets.tables(angles, share), masses.reaching(share)
        policies = {FULL: Full(max=size), ENDS: EndsOnly(SINKS, WINDOW)}
        policies |= matched_budgets.methods(share, tables, SINKS, WINDOW, mass)
        by_seed = [
            [
                parts.part(
                    f"{key}, {share:g} by {tables}, {mass}, {name}, seed {seed}",
                    partial(read, llm, ids[:size], prompt, policies, seed + options.seeds * number),
                )
                for number, (name, ids) in enumerate(novels.items())
            ]
            for seed in range(options.seeds)
        ]
        columns = np.moveaxis(np.array(by_seed), 2, 0)  # [P,seeds,texts,C]
        lines[f"{share:g}"] = {
            name: line(policy, measured if name in DRAWING else measured[:1], columns[0, :1])
            for (name, policy), measured in zip(policies.items(), columns, strict=True)
        }
    references = [{name: by_name.pop(name) for name in (FULL, ENDS)} for by_name in lines.values()]
    results = {
        "prompt": prompt, "scored": options.scored, "sinks": SINKS, "window": WINDOW,
        "stretches": len(novels), "seeds": options.seeds, **references[0],
        "shares": lines, "commits_of_parts": parts.commits,
    }  # fmt: skip
    return {"texts": list(novels), "perplexity": {llm.name: results}}


def chosen_on(
    llm: Llm, texts: Sequence[Sequence[int]], prompt: int, parts: Parts, key: str
) -> tuple[CosineHistogram, Masses]:
    """The angles by which K and L are chosen, and the masses by which that of top-p is."""
    seen = cache(lambda: [capture(llm, ids[:-1]) for ids in texts])

    def part(measure: Any) -> np.ndarray:
        compute = lambda: np.stack(measure(llm.spec, seen(), prompt, SINKS, WINDOW, EVERY))
        return parts.part(f"{key}, {measure.__name__}", compute)

    return CosineHistogram(*part(matched_budgets.angles)), Masses(*part(matched_budgets.masses))


def read(
    llm: Llm, ids: Sequence[int], prompt: int, policies: Mapping[str, Policy], seed: int
) -> Float[np.ndarray, "P C"]:
    """The COLUMNS of each policy on one text, the first of which is full attention."""
    full, *_ = roomy = [with_room(policy, prompt, len(ids)) for policy in policies.values()]
    text = measurement.Stretches(np.array([ids], np.int32), prompt)
    shares = {full: 1.0}

    def note_share(policy: Policy, stream: Stream) -> None:
        if policy != full:
            shares[policy] = share_read(llm, stream, ids)

    scores = measurement.measure(llm, text, roomy, seed, show_progress, full=full, after=note_share)
    return np.array([
        [x.loss, x.kl.mean(), x.agreement.mean(), shares[x.policy], x.state_bytes]
        for x in scores
    ])  # fmt: skip


def share_read(llm: Llm, stream: Stream, ids: Sequence[int]) -> float:
    """The share of the keys between the ends that the last token attends to, over layers."""
    last = len(ids) - 1
    shares = matched_budgets.attended_shares(
        llm.config, stream.policies, llm.weights, stream.decoding.states,
        jnp.full((1, 1), ids[-1], jnp.int32), jnp.full((1, 1), last, jnp.uint32), jnp.int32(last),
    )  # fmt: skip
    return float(np.mean(shares))


def with_room(policy: Policy, prompt: int, size: int) -> Policy:
    """The policy with slots for all `size` tokens at once, so that none are empty."""
    if isinstance(policy, MagicPIG):
        return replace(policy, start=prompt, tail=size - prompt)
    return replace(policy, start=size)


def line(
    policy: Policy, measured: Float[np.ndarray, "S T C"], full: Float[np.ndarray, "1 T C"]
) -> dict[str, Any]:
    """The entry of one method in the record; full: what full attention gives."""
    by_column = dict(zip(COLUMNS, np.moveaxis(measured, -1, 0), strict=True))
    read = by_column["read"]
    return {
        "policy": format_policy(policy),
        "loss": by_column["loss"].mean(),
        "over_full": excess(by_column["loss"], full[..., COLUMNS.index("loss")]),
        "kl": excess(by_column["kl"], np.zeros_like(by_column["kl"])),
        "agreement": by_column["agreement"].mean(),
        "share_read": {"mean": read.mean(), "each": read.mean(0).tolist()},
        "state_bytes": by_column["bytes"].mean(),
    }


MEASURE = Measure("sparse_135m", measure, FLAGS, model=SMOLLM2, texts=2)
RECORDS = {"sparse_135m": "2,048", "sparse_135m_4096": "4,096", "sparse_135m_7680": "7,680"}
TASKS = {"tasks": "1,024", "tasks_2048": "2,048", "tasks_4096": "4,096"}  # tokens of prompts
LOSS = 0.1  # of all answers; a smaller difference counts as none


def loss_path(method: str, share: str = "{share}") -> str:
    """The path of a method's loss over full attention's."""
    return f"perplexity/{{model}}/shares/{share}/{method}/over_full"


def over_ends(results: Results) -> dict[str, Any]:
    """The loss of magicpig over that of attention to the ends alone, both minus full's."""
    cases = {}
    for model in results["perplexity"].values():
        ends = model["ends alone"]["over_full"]["mean"]
        for share, methods in model["shares"].items():
            loss = methods["magicpig"]["over_full"]
            cases[f"{float(share):.0%}"] = {
                "mean": loss["mean"] / ends,
                "two_errors": loss["two_errors"]["stretches"] / ends,
            }
    return cases


CLAIMS = (
    *(claim("RULER 86.4 of 88.7, LongBench 70.3 of 71.2, with 2 % of the keys",
            f"After {tokens} tokens, `magicpig` with 2 to 20 % of the keys loses under a tenth of "
            "what sinks and window alone lose", name, below(over_ends, 0.1), unit="share")
      for name, tokens in RECORDS.items()),
    *(claim("RULER 87.6 against 82.1",
            f"After {tokens} tokens, `magicpig` loses less than Quest at equal shares, by more "
            "than two standard errors", name,
            below(loss_path("magicpig") + "/each", loss_path("quest") + "/each"))
      for name, tokens in RECORDS.items()),
    *(claim("RULER 86.4 of 88.7",
            f"In {tokens} tokens, `magicpig` recalls facts at most 10 points less often than full "
            "attention", name,
            above("tasks/{task}/{tokens}/ratios/{budget}/magicpig/score",
                  "tasks/{task}/{tokens}/full/score", by=-LOSS), unit="points")
      for name, tokens in TASKS.items()),
    *(claim("RULER 87.6 against 82.1",
            f"In {tokens} tokens, `magicpig` recalls facts over 10 points more often than Quest",
            name,
            above("tasks/{task}/{tokens}/ratios/{budget}/magicpig/score",
                  "tasks/{task}/{tokens}/ratios/{budget}/quest/score", by=LOSS), unit="points")
      for name, tokens in TASKS.items()),
    claim("RULER 86.4 of 88.7", "The published scores on RULER and LongBench", "",
          needs="an 8B model, and LongBench"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
