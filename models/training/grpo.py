"""Continued words: a small task for reinforcement learning by google-tunix's GRPO.

A prompt is a word of different letters, the answer repeats it, and a program counts right letters.
The experiment `training.rollouts` and the notebook on bounded rollouts use it. Training needs the
extra tunix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.typing import Array, Float, Float32

if TYPE_CHECKING:
    from flax import nnx

POLICY = "streaming:sinks=1,window=9"
ARMS = ("full", "mismatch", "weights", "bounded")
LETTERS, PERIOD, PROMPT, ANSWER = 16, 6, 8, 32  # PROMPT: tokens of it with padding
TEXT = 64  # tokens for which growing caches have room
PAD, BEGIN, END = 0, 1, 2
GROUP, PROMPTS = 8, 8  # answers of a prompt, and prompts of a step
CLIP = 2.0
LAST = 10  # steps whose mean reward is the result


class Letters:
    """The tokenizer: a token per letter."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - ord("a") + END + 1 for letter in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(i + ord("a") - END - 1) if i > END else "?" for i in ids)

    def pad_id(self) -> int:
        return PAD

    def bos_id(self) -> int:
        return BEGIN

    def eos_id(self) -> int:
        return END


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without tunix's warnings, progress bars, and log of meshes and metrics."""
    if find_spec("tunix") is None:
        raise UserError("this needs google-tunix: pip install -e '.[tunix]'")
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tunix.sft import progress_bar

            bar = progress_bar.tqdm
            hidden = lambda **settings: bar(**settings | {"disable": True})
            with patch.object(progress_bar, "tqdm", hidden):
                yield
    finally:
        log.setLevel(level)


def words(random: np.random.Generator, count: int) -> list[str]:
    """Words of different letters."""
    letters = [random.permutation(LETTERS)[:PERIOD] for _ in range(count)]
    return ["".join(chr(ord("a") + letter) for letter in word) for word in letters]


def continued(word: str) -> str:
    """The answer: the word again and again."""
    return (word * (ANSWER // PERIOD + 1))[:ANSWER]


def rewards(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """The share of right letters."""
    pairs = zip(prompts, completions, strict=True)
    return [sum(map(str.__eq__, text, continued(word))) / ANSWER for word, text in pairs]


def pretrained(seed: int, steps: int) -> nnx.Module:
    """A model that continues words with full attention, not yet well."""
    import optax
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    rngs, random = nnx.Rngs(seed), np.random.default_rng(seed)
    config = ModelConfig(
        num_layers=2, vocab_size=END + 1 + LETTERS, embed_dim=64, hidden_dim=128, num_heads=4,
        head_dim=16, num_kv_heads=2, norm_eps=1e-6, rope_theta=1_000_000,
    )  # fmt: skip
    model = Qwen3(config, rngs=rngs)
    fill_zeros(model, rngs)
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    length = 1 + PERIOD + ANSWER
    mask, positions = jnp.tril(jnp.ones((1, length, length), bool)), jnp.arange(length)[None]

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, ids: jax.Array) -> None:
        def loss(model: nnx.Module) -> jax.Array:
            logits = model(ids, positions.repeat(len(ids), 0), None, mask.repeat(len(ids), 0))[0]
            log_p = jax.nn.log_softmax(logits[:, PERIOD:-1])
            return -jnp.mean(jnp.take_along_axis(log_p, ids[:, PERIOD + 1 :, None], axis=2))

        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(steps):
        texts = [word + continued(word) for word in words(random, 64)]
        step(model, optimizer, jnp.asarray([[BEGIN, *Letters().encode(t)] for t in texts]))
    return model


def fill_zeros(model: nnx.Module, rngs: nnx.Rngs) -> None:
    """Draw the parameters that are all 0, as those of an MLP are in a new model of tunix."""
    from flax import nnx

    for leaf in jax.tree.leaves(nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        if not jnp.any(leaf[...]):
            leaf[...] = jax.random.normal(rngs.params(), leaf.shape) * leaf.shape[0] ** -0.5


def train(arm: str, model: nnx.Module, seed: int, steps: int) -> dict[str, Any]:
    """Train a copy of the model by GRPO; the rewards and differences of its steps."""
    import optax
    from flax import nnx
    from jax.sharding import Mesh
    from tunix.rl import rl_cluster as rl
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from jaxkv.adapters.tunix import with_policy

    graph, state = nnx.split(model)
    actor = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    actor = with_policy(actor, POLICY) if arm == "bounded" else actor
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT
    cluster = rl.RLCluster(
        actor=actor,
        tokenizer=Letters(),
        cluster_config=rl.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=sampler_of(POLICY if arm in ("mismatch", "weights") else None),
            training_config=rl.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-4), eval_every_n_steps=10**6, max_steps=steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=ANSWER, max_prompt_length=PROMPT, kv_cache_size=TEXT,
                temperature=1.0, return_logprobs=True,
            ),
        ),
    )  # fmt: skip
    log: list[tuple[float, float]] = []
    learner = learner_of(arm == "weights", log)(
        rl_cluster=cluster,
        reward_fns=rewards,
        algo_config=GRPOConfig(num_generations=GROUP, beta=0.0),
    )
    random = np.random.default_rng(seed)
    learner.train([{"prompts": np.array(words(random, PROMPTS))} for _ in range(steps)])
    by_step, differences = map(list, zip(*log, strict=True))
    return {
        "seed": seed,
        "rewards": by_step,
        "first_reward": by_step[0],
        "reward": float(np.mean(by_step[-LAST:])),
        "difference": float(np.mean(differences)),
    }


def sampler_of(policy: str | None) -> type:
    """The class of a sampler with a policy, whose draws differ from step to step."""
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from jaxkv.adapters.tunix import with_policy

    class Rollout(VanillaRollout):
        def __init__(self, rollout_actor: nnx.Module, tokenizer: Letters, **_: Any) -> None:
            model = rollout_actor if policy is None else with_policy(rollout_actor, policy)
            super().__init__(model, tokenizer, cache_config(model, TEXT))
            self.calls = 0

        def generate(self, prompts: list[str], rollout_config: Any, **settings: Any) -> Any:
            self.calls += 1
            config = dataclasses.replace(rollout_config, seed=jax.random.key(self.calls))
            return super().generate(prompts, config, **settings)

    return Rollout


def learner_of(weighted: bool, log: list[tuple[float, float]]) -> Callable[..., Any]:
    """The class of a learner that logs the reward and the difference of each step."""
    from flax import nnx
    from tunix.rl import common
    from tunix.rl.grpo.grpo_learner import GRPOLearner

    class Learner(GRPOLearner):
        def _generate_and_compute_advantage(self, batch: Any, *modes: Any) -> Any:
            outputs, generate = [], self.rl_cluster.generate

            def generate_and_keep(*words: Any, **settings: Any) -> Any:
                outputs.append(generate(*words, **settings))
                return outputs[-1]

            self.rl_cluster.generate = generate_and_keep
            example = super()._generate_and_compute_advantage(batch, *modes)
            self.rl_cluster.generate = generate
            graph, state = nnx.split(self.rl_cluster.actor_trainer.model)
            ids = example.prompt_ids, example.completion_ids
            learned = np.asarray(common.compute_per_token_logps(graph, state, *ids, PAD, END))
            sampled = padded(outputs[0].logprobs, learned.shape)
            # A generated padding token is hidden from later ones, in the sampler alone.
            valid = np.cumprod(np.asarray(example.completion_ids) != PAD, axis=1).astype(bool)
            difference = float(np.abs(learned - sampled)[valid].mean())
            log.append((float(np.mean(rewards(batch["prompts"], outputs[0].text))), difference))
            if not weighted:
                return example
            ratio = np.minimum(np.exp(learned - sampled), CLIP)
            return dataclasses.replace(example, sampler_is_weights=jnp.asarray(ratio))

    return Learner


def cache_config(model: nnx.Module, tokens: int) -> Any:
    """Cache sizes for tunix's Sampler. tokens: of prompt and answer; growing caches have room."""
    from tunix.generate.sampler import CacheConfig

    config = model.config
    return CacheConfig(tokens, config.num_layers, config.num_kv_heads, config.head_dim)


def learner_log_probabilities(
    model: nnx.Module, output: Any, forbidden: Sequence[int]
) -> Float32[Array, "B T"]:
    """Log probabilities of a Sampler's output, as tunix's trainers compute them.

    forbidden: tokens that the sampler left out: padding first, the end of a text last.
    """
    from flax import nnx
    from tunix.rl import common

    prompt, completion = jnp.asarray(output.padded_prompt_tokens), jnp.stack(output.tokens)
    graph, state = nnx.split(model)
    _, logits = common.compute_per_token_logps(
        graph, state, prompt, completion, forbidden[0], forbidden[-1], return_logits=True
    )
    logits = logits.at[:, :, jnp.array(forbidden)].set(-jnp.inf)
    return common.selective_log_softmax(logits, completion)


def padded(rows: Sequence[Sequence[float]], shape: tuple[int, ...]) -> Float[np.ndarray, "B T"]:
    out = np.zeros(shape, np.float32)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out
