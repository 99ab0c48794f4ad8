"""Log probabilities of long rollouts: sampler against learner.

The Sampler of google-tunix generates text with a random Qwen3 in a bounded cache. tunix's function
of log probabilities then reads the whole text, as its trainers do: in a learner with the attention
of the sampler (`jaxkv.adapters.tunix`), and in one with full attention. The weights are in float32.
The logits of the random model are doubled, because they would be nearly uniform, so that errors of
attention would hardly show. Run it where the extra tunix is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.verdict import Results, Statement, above, claim, within
from jaxkv.models.training.grpo import (
    END,
    PAD,
    Letters,
    cache_config,
    fill_zeros,
    learner_log_probabilities,
    quiet,
)

if TYPE_CHECKING:
    from flax import nnx

POLICIES = {  # with 64 slots; snapkv has them for the prompt, and stores all later tokens
    "streaming": "streaming:sinks=4,window=60",
    "reservoir": "reservoir:sinks=4,window=28,sample=32",
    "balance-stream": "balance-stream:sinks=4,window=36,levels=2,block=16",
    "snapkv": "snapkv:capacity=64,window=16",
}
VOCAB, LOGIT_SCALE = 128, 2.0
FORBIDDEN = (PAD, END)  # so that texts have neither padding nor an end
BOUND = 1e-4  # nats, on the difference of any token

FLAGS = (
    flag("--seeds", (0, 1, 2)),
    flag("--policies", tuple(POLICIES), choices=POLICIES),
    flag("--prompt", 256, "tokens of the longest prompt", minimum=2),
    flag("--tokens", 2000, "generated tokens", minimum=1),
    flag("--sequences", 2, minimum=1),
)


class SampledText(NamedTuple):
    """What the Sampler returned, and the log probabilities of its tokens."""

    output: Any
    log_probabilities: np.ndarray


def measure(run: Run) -> dict[str, Any]:
    """Generate with each policy and seed, and compare both learners with the sampler."""
    options = run.options
    by_policy: dict[str, list[dict[str, Any]]] = {name: [] for name in options.policies}
    with quiet():
        for seed in options.seeds:
            model = random_model(seed)
            texts = prompts(seed, options.sequences, options.prompt)
            for name in options.policies:
                result = compare(model, POLICIES[name], texts, options.tokens, seed)
                by_policy[name].append(result)
                print(f"seed {seed}, {name}: {result}", flush=True)
    measures = by_policy[options.policies[0]][0]
    return {
        "prompt": options.prompt,
        "tokens": options.tokens,
        "sequences": options.sequences,
        "uniform_nats_per_token": math.log(VOCAB - len(FORBIDDEN)),
        "policies": {
            name: {"policy": POLICIES[name], "seeds": seeds}
            | {key: spread([seed[key] for seed in seeds]) for key in measures}
            for name, seeds in by_policy.items()
        },
    }


def random_model(seed: int) -> nnx.Module:
    """A Qwen3 of random weights."""
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    rngs = nnx.Rngs(seed)
    config = ModelConfig(
        num_layers=3, vocab_size=VOCAB, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16,
        num_kv_heads=2, norm_eps=1e-6, rope_theta=1_000_000, use_tied_embedding=False,
    )  # fmt: skip
    model = Qwen3(config, rngs=rngs)
    fill_zeros(model, rngs)
    model.lm_head.w[...] = LOGIT_SCALE * model.lm_head.w[...]
    return model


def prompts(seed: int, count: int, tokens: int) -> list[str]:
    """Random texts; the second has half the tokens of the first, and so on.

    tokens: of the first, with the one that begins a text.
    """
    random, alphabet = np.random.default_rng(seed), VOCAB - END - 1
    lengths = [max(tokens >> number, 2) - 1 for number in range(count)]
    return [Letters().decode(random.integers(0, alphabet, n) + END + 1) for n in lengths]


def compare(
    model: nnx.Module, policy: str, texts: Sequence[str], tokens: int, seed: int
) -> dict[str, float]:
    """The differences of log probabilities of both learners, and the sampler's nats per token."""
    from jaxkv.adapters.tunix import with_policy

    prompt = 1 + max(map(len, texts))
    bounded = with_policy(model, policy, prompt=prompt, seed=seed)
    rollout = generate(bounded, texts, prompt, tokens, seed)
    ours, full = differences(bounded, rollout), differences(model, rollout)
    return {
        "largest": float(ours.max()),
        "mean": float(ours.mean()),
        "full_largest": float(full.max()),
        "full_mean": float(full.mean()),
        "nats_per_token": float(-rollout.log_probabilities.mean()),
    }


def generate(
    model: nnx.Module, texts: Sequence[str], prompt: int, tokens: int, seed: int
) -> SampledText:
    """Texts of tunix's Sampler at temperature 1."""
    from tunix.generate.sampler import Sampler

    sampler = Sampler(model, Letters(), cache_config(model, prompt + tokens))
    output = sampler(
        texts, max_generation_steps=tokens, max_prompt_length=prompt, temperature=1.0, top_p=1.0,
        seed=seed, return_logprobs=True, forbidden_tokens=FORBIDDEN,
    )  # fmt: skip
    return SampledText(output, np.asarray(output.logprobs))


def differences(learner: nnx.Module, rollout: SampledText) -> np.ndarray:
    """Absolute differences of log probabilities, by token."""
    learned = learner_log_probabilities(learner, rollout.output, FORBIDDEN)
    return np.abs(jax.device_get(learned) - rollout.log_probabilities)


def times_larger(results: Results) -> dict[str, float]:
    """The smallest mean difference with full attention over the largest with the adapter."""
    return {
        name: policy["full_mean"]["min"] / policy["mean"]["max"]
        for name, policy in results["policies"].items()
    }


MEASURE = Measure("long_rollouts", measure, FLAGS)
CLAIMS = (
    claim("not claimed", "After 2,000 tokens in a bounded cache, no log probability of the "
          "adapter's learner differs from the sampler's by over 1e-4", "long_rollouts",
          within("policies/{policy}/largest", by=BOUND), unit="number"),
    claim("Sparse-RL (arXiv 2601.10079): the mismatch of compressed rollouts",
          "A learner with full attention differs from them by over 0.1 nats on average",
          "long_rollouts", above("policies/{policy}/full_mean", by=0.1)),
)  # fmt: skip


def long_rollouts_table() -> str:
    """A row for each policy."""
    results = read("long_rollouts")["results"]
    rows = [
        (f"`{policy['policy']}`",
         *(ranged(policy[name], "median", ".2g")
           for name in ("largest", "mean", "full_largest", "full_mean")))
        for policy in results["policies"].values()
    ]  # fmt: skip
    seeds = len(results["policies"]["streaming"]["seeds"])
    entropies = [policy["nats_per_token"]["median"] for policy in results["policies"].values()]
    caption = (
        "Absolute differences of log probabilities in nats, sampler against learner, of "
        f"{results['sequences']} sequences of {results['tokens']:,} tokens. Medians of {seeds} "
        f"seeds, with the range. The sampler has {min(entropies):.1f} to {max(entropies):.1f} nats "
        f"per token; uniform logits have {results['uniform_nats_per_token']:.1f}."
    )
    heads = ("policy", "adapter, largest", "adapter, mean", "full attention, largest",
             "full attention, mean")  # fmt: skip
    return table(heads, rows, caption)


TABLES = {"long_rollouts": long_rollouts_table}
STATEMENTS = (
    Statement("docs/adapters.md", "a learner with the attention of the sampler differs from it by "
              "rounding alone", "long_rollouts",
              [within("policies/{policy}/largest", by=BOUND)]),
    Statement("docs/adapters.md", "the mean difference of a learner with full attention is over a "
              "hundred thousand times as large", "long_rollouts", [above(times_larger, 1e5)]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
