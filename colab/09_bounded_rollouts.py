# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/09_bounded_rollouts.ipynb)
#
# # Bounded rollouts
#
# In reinforcement learning, a sampler generates answers and a learner computes their log
# probabilities again. A bounded cache makes long answers cheaper for the sampler, but a learner with
# full attention then trains another model than the one that wrote the answers
# ([Sparse-RL](https://arxiv.org/abs/2601.10079)). This notebook trains a small model with
# [google-tunix](https://github.com/google/tunix), with and without this mismatch. The third cell
# lists the devices on which this notebook has run and its run time on each.

# %% tags=["install"]
# tunix needs a newer flax. jax stays, because it must match the plug-in of the accelerator.
from importlib.metadata import version  # noqa: F401

# %pip install -q "jaxkv[models,tunix] @ git+https://github.com/jaxkv/jaxkv" jax=={version("jax")}
# %%
from jaxkv.colab import runtime

runtime.begin("09_bounded_rollouts")

# %% [markdown]
# ## A task whose reward a program checks
#
# A prompt is a word of six different letters. The right answer repeats the word. The reward is the
# share of right letters, so it needs no model of rewards:

# %%
import numpy as np

from jaxkv.models.training import grpo

words = grpo.words(np.random.default_rng(0), 4)
answers = [grpo.continued(word) for word in words]
for word, answer in zip(words, answers, strict=True):
    print(f"{word}: right answer {answer}")
print("rewards of the first right answer and of half of it:",
      *grpo.rewards([words[0]] * 2, [answers[0], answers[0][: grpo.ANSWER // 2]]))  # fmt: skip

# %% [markdown]
# The model is a Qwen3 of tunix with two layers. It was trained with full attention for a few steps,
# so it continues words, but not well yet. `with_policy` returns a model with the same weights and
# another attention: each query attends to the first token and to the newest nine. A repetition is
# six tokens long, so this cache can solve the task.

# %%
from jaxkv.adapters.tunix import with_policy

POLICY = "streaming:sinks=1,window=9"
SEED = 1
with grpo.quiet():  # without tunix's warnings
    model = grpo.pretrained(SEED, steps=runtime.size(25, 2))
bounded = with_policy(model, POLICY)
print(type(bounded).__name__, "with", POLICY)

# %% [markdown]
# ## Does the learner see what the sampler saw?
#
# tunix's `Sampler` takes the bounded model as it is. It returns the log probability of each token
# that it sampled. A learner reads the whole text at once, without a cache. The next cells give the
# text to two learners: the model with full attention, and the bounded model.

# %%
from tunix.generate.sampler import Sampler

forbidden = [grpo.PAD, grpo.END]
with grpo.quiet():
    sampler = Sampler(bounded, grpo.Letters(), grpo.cache_config(model, grpo.TEXT))
    output = sampler(
        words, max_generation_steps=grpo.ANSWER, max_prompt_length=grpo.PROMPT, temperature=1.0,
        top_p=1.0, seed=0, return_logprobs=True, forbidden_tokens=forbidden,
    )  # fmt: skip
print(*output.text, sep="\n")


# %%
def difference(learner):
    """Absolute differences of log probabilities from the sampler's, by token."""
    learned = grpo.learner_log_probabilities(learner, output, forbidden)
    return np.abs(np.asarray(learned) - np.asarray(output.logprobs))


for name, learner in {"full attention": model, "bounded attention": bounded}.items():
    print(f"{name}: {difference(learner).mean():.1e} nats per token")

# %% [markdown]
# The bounded learner agrees with the sampler up to rounding. This is all that a reader changes in
# training: the actor of tunix's `RLCluster` is the bounded model.
#
# ```python
# cluster = RLCluster(actor=with_policy(model, POLICY), tokenizer=..., cluster_config=...)
# learner = GRPOLearner(rl_cluster=cluster, reward_fns=rewards, algo_config=GRPOConfig(...))
# learner.train(prompts)
# ```
#
# ## Training in four variants
#
# | variant | sampler | learner |
# | --- | --- | --- |
# | `full` | full attention | full attention |
# | `mismatch` | bounded | full attention |
# | `weights` | bounded | full attention; each token is weighted by the ratio of its probabilities |
# | `bounded` | bounded | bounded |
#
# `weights` is the repair of Sparse-RL. All variants begin with the same weights and see the same
# words. [grpo.py](https://github.com/jaxkv/jaxkv/blob/main/models/training/grpo.py) has the code, with
# all settings of `RLCluster`.

# %%
STEPS = runtime.size(60, 3)
with grpo.quiet():
    trained = {arm: grpo.train(arm, model, SEED, STEPS) for arm in grpo.ARMS}
print(f"{'variant':10}{'first reward':>14}{'last rewards':>14}{'difference':>12} nats")
for arm, result in trained.items():
    print(f"{arm:10}{result['first_reward']:14.3f}{result['reward']:14.3f}"
          f"{result['difference']:12.1e}")  # fmt: skip

# %% tags=["picture"]
from jaxkv.models.tools import palette, pictures

SMOOTH = runtime.size(grpo.LAST, 2)  # steps
figure, (left, right) = pictures.begin(6.6, 3.6, columns=2)
for row, (arm, result) in enumerate(trained.items()):
    mean = np.convolve(result["rewards"], np.full(SMOOTH, 1 / SMOOTH), "valid")
    steps = np.arange(SMOOTH, STEPS + 1)
    left.plot(steps, 100 * mean, color=palette.ROLLOUTS[arm], label=arm)
    right.barh(-row, result["difference"], color=palette.ROLLOUTS[arm])
left.set(xlabel=f"step of GRPO, mean of {SMOOTH}", ylabel="reward: right letters (%)")
right.set_yticks([-row for row in range(len(trained))], trained)
right.set(xlabel="difference of log probabilities (nats)", xscale="log", xlim=(1e-8, 1))
left.legend(frameon=False, fontsize=8)
caption = f"one model, {grpo.PROMPTS} words and {grpo.GROUP} answers of each per step; {POLICY}"
runtime.picture(figure, "Training with bounded rollouts", caption)

# %% [markdown]
# **What to see.** The right panel shows the mean absolute difference of log probabilities between
# learner and sampler, over all steps. With full attention in the learner it is over a thousand
# times larger than with the bounded learner, which only rounds differently. Weighted tokens repair part of
# the gradient, but the difference stays.
#
# The left panel shows the reward. The bounded learner earns more than the learners with full
# attention whose sampler is bounded. Full attention in both earns more still: this model was trained
# with it, and the bounded cache costs reward before the first step. So a bounded cache does not
# improve training. It makes rollouts cheaper, and its learner keeps most of the reward.
#
# This is one model, and models differ by more than the variants.
# [docs/adapters.md](https://github.com/jaxkv/jaxkv/blob/main/docs/adapters.md) has three models, and
# texts of 2,000 tokens.
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
reward = {arm: result["reward"] for arm, result in trained.items()}
mismatch = {arm: result["difference"] for arm, result in trained.items()}
first = {arm: result["first_reward"] for arm, result in trained.items()}
runtime.verify(
    "",
    always={
        "the right answer has reward 1, and reward 0 for a word of other letters":
            grpo.rewards(words, answers) == [1] * len(words)
            and grpo.rewards(["abcdef"], [grpo.continued("ghijkl")]) == [0],
        "the bounded learner has the sampler's log probabilities within 1e-5":
            float(difference(bounded).max()) < 1e-5,
        "the learner with full attention does not": float(difference(model).max()) > 0.01,
        "in training, bounded and full differ by less than 1e-5 on average":
            max(mismatch["bounded"], mismatch["full"]) < 1e-5,
        "mismatch and weights differ by more than a thousand times as much":
            min(mismatch["mismatch"], mismatch["weights"]) > 1e3 * mismatch["bounded"],
        "all bounded samplers begin with the same answers":
            len({first[arm] for arm in ("mismatch", "weights", "bounded")}) == 1,
    },
    times={  # a short training, and one with the rounding of another device, may end otherwise
        "mismatch and weights differ by more than 0.05 nats":
            min(mismatch["mismatch"], mismatch["weights"]) > 0.05,
        "all variants earn more reward than at first": all(reward[arm] > first[arm]
                                                           for arm in grpo.ARMS),
        "the bounded learner earns more than mismatch and weights":
            reward["bounded"] > max(reward["mismatch"], reward["weights"]),
        "full attention in both earns more still": reward["full"] > reward["bounded"],
    },
)  # fmt: skip
