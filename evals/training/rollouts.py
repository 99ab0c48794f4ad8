"""Reinforcement learning with bounded rollouts: does the learner see what the sampler saw?

A small Qwen3 of google-tunix continues a repeated word. It was trained with full attention, on few
texts, and GRPO trains it further in four ways. `full`: sampler and learner have full attention.
`mismatch`: the sampler has a bounded cache. `weights`: as `mismatch`, and each token is weighted by
the ratio of its probabilities, at most `grpo.CLIP`, as the repair of Sparse-RL (arXiv 2601.10079).
`bounded`: the learner has the attention of the sampler (`jaxkv.adapters.tunix`). Run it where the
extra tunix is installed.
"""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.verdict import Derived, Statement, above, claim, within
from jaxkv.models.training.grpo import ARMS, LAST, POLICY, pretrained, quiet, train

FLAGS = (
    flag("--seeds", (0, 1, 2)),
    flag("--arms", ARMS, choices=ARMS),
    flag("--pretraining", 25, "steps of training with full attention", minimum=1),
    flag("--steps", 60, "steps of GRPO", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """Pretrain a model for each seed, and train it further in every way."""
    options = run.options
    arms: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    with quiet():
        for seed in options.seeds:
            model = pretrained(seed, options.pretraining)
            for arm in options.arms:
                trained = train(arm, model, seed, options.steps)
                arms[arm].append(trained)
                print(f"seed {seed}, {arm}: reward {trained['reward']:.3f}, difference of log "
                      f"probabilities {trained['difference']:.2g}", flush=True)  # fmt: skip
    names = ("first_reward", "reward", "difference")
    return {
        "policy": POLICY,
        "arms": {
            arm: {"seeds": seeds} | {name: spread([s[name] for s in seeds]) for name in names}
            for arm, seeds in arms.items()
        },
    }


def more_reward(arm: str, base: str) -> Derived:
    """The reward of the last steps over that of another way, for each seed."""
    return lambda results: {
        f"seed {ours['seed']}": ours["reward"] - other["reward"]
        for ours, other in zip(
            results["arms"][arm]["seeds"], results["arms"][base]["seeds"], strict=True
        )
    }


MEASURE = Measure("rollouts", measure, FLAGS)
CLAIMS = (
    claim("Sparse-RL (arXiv 2601.10079): the mismatch of compressed rollouts",
          "With a bounded cache in the sampler, the learner's log probabilities differ from the "
          "sampler's by over 0.05", "rollouts",
          above("arms/mismatch/difference", by=0.05)),
    claim("not claimed", "A learner with the attention of the sampler has no mismatch: under 1e-5",
          "rollouts", within("arms/bounded/difference", by=1e-5), unit="number"),
    claim("not claimed", "It earns more reward than a learner of full attention, for each seed",
          "rollouts", above(more_reward("bounded", "mismatch")), unit="points"),
)  # fmt: skip


def rollouts_table() -> str:
    """A row for each way of training."""
    results = read("rollouts")["results"]
    rows = [
        (f"`{arm}`", ranged(cells["first_reward"], "median", ".2f"),
         ranged(cells["reward"], "median", ".3f"), ranged(cells["difference"], "median", ".2g"))
        for arm, cells in results["arms"].items()
    ]  # fmt: skip
    seeds = len(results["arms"]["full"]["seeds"])
    caption = (
        f"Medians of {seeds} seeds, with the range. Difference: mean absolute difference of log "
        "probabilities, sampler against learner."
    )
    heads = (
        "variant",
        "reward of the first step",
        f"of the last {LAST} steps",
        "difference (nats)",
    )
    return table(heads, rows, caption)


TABLES = {"rollouts": rollouts_table}
STATEMENTS = (
    Statement("docs/adapters.md", "For each seed the learner of the adapter earns more reward than "
              "`mismatch`", "rollouts", [above(more_reward("bounded", "mismatch"))]),
    Statement("docs/adapters.md", "The median of full attention is higher", "rollouts",
              [above("arms/full/reward", "arms/bounded/reward", sure=False)]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
