"""Every policy side by side: one text, one model, one KV budget.

The text and the model come with the package, so anybody can repeat this. Every policy except `full`
gets a budget of 128 tokens per KV head, cached or attended per query, after a prompt of 317 tokens
(short) and after one of 4,097 (long). `topp` chooses its own number of keys. Three measurements:
the loss after the short prompt, for all policies; the loss of an unbounded text, for those that
need no prompt or compress again and again; and the time of a token after the long prompt, also of
policies that compress again and again, and with budgets that this model and text calibrate.

Stops if full attention misses its recorded loss, because the results would then not be comparable
with earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxkv import models
from jaxkv.cli.progress import show_progress
from jaxkv.contract import Policy
from jaxkv.evals.lib import timing
from jaxkv.evals.lib.paired_losses import excess
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import DEFAULT, Measure, Run, run
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.evals.tasks import budgets
from jaxkv.models.loading.compilation import Stopwatch
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import measurement
from jaxkv.models.tools.calibrate import calibrate
from jaxkv.models.tools.measurement import Stretches
from jaxkv.models.tools.passage import PASSAGE, passage
from jaxkv.policies import POLICIES, MagicPIG
from jaxkv.policies.prompt_compression import head_shares
from jaxkv.policies.sparse_attention.base import SparsePolicy
from jaxkv.typing import Float

SINKS, WINDOW, LEFT = 4, 61, 63  # ends of a prompt; tokens cached or attended between them
BUDGET = SINKS + WINDOW + LEFT
MASS = 0.9  # of topp
SHORT, LONG = 2, 6  # halvings of the tokens between a prompt's ends, down to LEFT
# K and L with which magicpig attends to LEFT tokens (evals/magicpig/matched_budgets.py).
TABLES = {SHORT: (6, 47), LONG: (10, 57)}
SCORED = 64  # tokens after the short prompt; few, because a compressed prompt caches all of them
EVERY = 16  # tokens of endless text between two compressions, within BUDGET
BLOCK = 512  # losses of endless text whose mean is one sample of the interval
SEEDS = 5
DRAWING = ("reservoir", "stratified", "balance-stream", "balance", "vase", *matched_budgets.DRAWING)
WRITTEN = 32  # timed tokens
# Recorded loss of full attention after the short prompt, by number of stretches; its tolerance.
FULL_LOSS, TOLERANCE = {7: 3.6520, 39: 3.6586}, 0.001


def settings(rounds: int, room: int = 0) -> dict[str, str]:
    """Every policy, with a budget of BUDGET tokens for this prompt.

    room: tokens after the prompt. Caches that grow have as many slots as tokens, so that bytes and
    times have no empty slots.
    """
    slots, ends = prompt_of(rounds) + room, budgets.Between(SINKS, WINDOW, 0.5**rounds)
    tuned = budgets.Tuned(*TABLES[rounds], MASS)
    policies = budgets.at_budget(BUDGET, ends, rounds, slots, WINDOW, tuned)
    return {name: policies.get(name, f"{name}:start={slots}") for name in POLICIES}


def prompt_of(rounds: int) -> int:
    """The length of a prompt that leaves BUDGET tokens after this many halvings."""
    return SINKS + WINDOW + (LEFT << rounds)


def measure(run: Run) -> dict[str, Any]:
    """All measurements, by policy."""
    jax.config.update("jax_enable_compilation_cache", False)  # of this process alone
    reset_cache()  # the programs that loaded the model may have used it
    llm, quick = run.llm, run.options.quick
    ids = passage(llm, 3_000 if quick else 15_000)
    run.record.about["seeds"] = list(range(2 if quick else SEEDS))
    prompt, long, seeds = prompt_of(SHORT), prompt_of(2 if quick else LONG), 2 if quick else SEEDS
    size = prompt + SCORED + 1
    stretches = [
        [*llm.tokenizer.front, *ids[at : at + size - 1]] for at in range(1, len(ids) - size, size)
    ]
    text, short = Stretches(np.array(stretches, np.int32), prompt), settings(SHORT)
    losses = after_prompts(llm, text, short, seeds)
    check(float(losses["full"].mean()), len(stretches))
    rows: dict[str, Any] = {
        name: {"policy": setting, "after_prompt": excess(losses[name], losses["full"]),
               "tokens": attended_after(llm, text, setting)}
        for name, setting in short.items()
    }  # fmt: skip
    again = budgets.repeated(BUDGET, EVERY, WINDOW)
    endless = {
        name: blocks(llm, ids, again.get(name, short[name]), draws(name, seeds))
        for name in POLICIES if name in again or POLICIES[name]().min_prompt is None
    }  # fmt: skip
    for name, block_losses in endless.items():
        rows[name]["endless"] = excess(block_losses, endless["streaming"])
        rows[name]["endless"]["loss"] = float(block_losses.mean())
    after_long = settings(SHORT if quick else LONG, WRITTEN)
    with TemporaryDirectory() as folder:
        calibration = Path(folder) / "FILE"
        calibration.write_text(head_shares.write(calibrate(llm, PASSAGE.read_text("utf-8"))))
        repeated = budgets.repeated(BUDGET, EVERY, WINDOW, str(calibration))
        extra = {f"{name}, repeated": string for name, string in repeated.items()}
        if equal := after_long.get("retrieval"):
            calibrated = f"{equal},budgets=calibrated,calibration={calibration}"
            extra[budgets.CALIBRATED] = calibrated
        extra = {n: string for n, string in extra.items() if string.split(":")[0] in after_long}
        cost = costs(llm, ids[:long], after_long | extra, 3 if quick else 9)
    for name in rows:
        rows[name]["long"] = {"policy": after_long[name], **cost[name]}
    others = {
        name: {"policy": string.replace(str(calibration), "FILE"), **cost[name]}
        for name, string in extra.items()
    }
    return {
        "tokens": len(ids), "stretches": len(stretches), "prompt": prompt, "scored": SCORED,
        "seeds": seeds, "block": BLOCK, "long": long, "budget": BUDGET,
        "full_loss": float(losses["full"].mean()), "rows": rows, "other_costs": others,
    }  # fmt: skip


def draws(name: str, seeds: int) -> int:
    """The number of seeds of a policy: one if it is deterministic."""
    return seeds if name in DRAWING else 1


def check(loss: float, stretches: int) -> None:
    """Raise SystemExit if full attention misses its recorded loss."""
    recorded = FULL_LOSS[stretches]
    if not abs(loss - recorded) <= TOLERANCE:
        raise SystemExit(
            f"the loss of full attention must be within {TOLERANCE} of {recorded}, got {loss:.4f}, "
            "so nothing is written: model, passage or decoder has changed; if that is intended, "
            "put the new loss into FULL_LOSS of evals/comparison/side_by_side.py"
        )


def after_prompts(
    llm: Llm, text: Stretches, policies: Mapping[str, str | Policy], seeds: int
) -> dict[str, Float[np.ndarray, "X N"]]:
    """By policy, the mean loss after the prompt of each stretch, by seed."""
    means: dict[str, list[np.ndarray]] = {name: [] for name in policies}
    for seed in range(seeds):
        names = [name for name in policies if draws(name, seeds) > seed]
        if not names:
            break
        seeded = [policies[name] for name in names]
        # Stretch number i has the seed of the first plus i.
        scores = measurement.measure(llm, text, seeded, seed * len(text.tokens), show_progress)
        for name, score in zip(names, scores, strict=True):
            means[name].append(score.by_stretch.mean(axis=1))
    jax.clear_caches()  # a process can map only this many compiled programs
    return {name: np.stack(by_seed) for name, by_seed in means.items()}


def blocks(llm: Llm, ids: Sequence[int], setting: str, seeds: int) -> Float[np.ndarray, "X N"]:
    """The mean loss of each whole block of an unbounded text, by seed."""

    def block_means(seed: int) -> Float[np.ndarray, " N"]:
        stream = models.Stream(llm, setting, seed=seed, tokens=len(ids))
        token_losses = np.concatenate(list(models.losses(llm, ids, stream=stream)))
        token_losses = token_losses[: len(token_losses) - len(token_losses) % BLOCK].reshape(
            -1, BLOCK
        )
        return token_losses.mean(axis=1, dtype=np.float64)

    by_seed = []
    with show_progress(f"{setting.split(':')[0]}, endless text", seeds, "seeds") as report:
        for seed in range(seeds):
            by_seed.append(block_means(seed))
            report(len(by_seed))
    return np.stack(by_seed)


def attended_after(llm: Llm, text: Stretches, setting: str) -> dict[str, dict[str, float]]:
    """The number of attended tokens after the first stretch's prompt, and after its last token."""
    tokens, prompt = text.tokens[0].tolist(), text.prompt
    stream = models.Stream(llm, setting, tokens=len(tokens))
    stream.prefill([tokens[:prompt]])
    stream.finish_prefill()
    first = attended(stream)
    stream.prefill([tokens[prompt:]])
    return {"first": first, "last": attended(stream)}


def costs(
    llm: Llm, ids: Sequence[int], chosen: Mapping[str, str], count: int
) -> dict[str, dict[str, Any]]:
    """By policy: attended tokens and bytes after prefill, bytes during prefill, the seconds of
    compiling the programs of a prefill, its end and an answer, and the time of a token and its
    ratio to full attention's, over `count` rounds."""
    by_policy: dict[str, dict[str, Any]] = {}
    variants = {}
    for name, setting in chosen.items():
        stopwatch = Stopwatch()
        jax.clear_caches()  # policies share programs
        with stopwatch.running():
            stream = models.Stream(llm, setting, tokens=len(ids) + WRITTEN)
            stream.prefill([ids])
            reading = stream.state_bytes
            stream.finish_prefill()
        tokens = attended(stream)
        variants[name] = timing.decode_variant(stream, WRITTEN)
        by_policy[name] = {"reading_bytes": reading, "state_bytes": stream.state_bytes,
                           "tokens": tokens}  # fmt: skip
        with stopwatch.running():
            variants[name]()
        by_policy[name]["compile_seconds"] = stopwatch.compile_seconds
    seconds = timing.time_rounds(variants, count, "time of a token")
    for name, policy_costs in by_policy.items():
        policy_costs["microseconds"] = spread(1e6 / WRITTEN * np.array(seconds[name]))
        policy_costs["times_as_long"] = timing.ratio(seconds[name], seconds["full"])
    return by_policy


def attended(stream: models.Stream) -> dict[str, float]:
    """The number of tokens that the next one attends to besides itself: mean, min and max.

    Cached tokens are counted by layer and KV head; selected keys are averaged per layer.
    """
    llm, lengths = stream.llm, stream.lengths
    if isinstance(stream.policies[0], SparsePolicy | MagicPIG):
        stream.reserve(1)
        stream.lengths = lengths
        between = int(lengths[0]) + 1 - SINKS - WINDOW
        read = matched_budgets.attended_shares(
            llm.config, stream.policies, llm.weights, stream.decoding.states,
            jnp.argmax(stream.decoding.logits, axis=-1)[:, None].astype(jnp.int32),
            stream.decoding.position[:, None], jnp.int32(lengths[0]),
        )  # fmt: skip
        counts = SINKS + WINDOW - 1 + between * np.asarray(read)
    else:
        cached = [policy.cached(llm.spec, state) for policy, state in
                zip(stream.policies, stream.decoding.states, strict=True)]  # fmt: skip
        counts = np.stack(
            [np.sum(np.asarray(layer.log_weight)[0] > -np.inf, axis=1) for layer in cached]
        )
    return {"mean": float(counts.mean()), "min": float(counts.min()), "max": float(counts.max())}


MEASURE = Measure("side_by_side", measure, model=DEFAULT, data=lambda _: [PASSAGE])

if __name__ == "__main__":
    run(MEASURE)
