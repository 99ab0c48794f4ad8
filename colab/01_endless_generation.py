# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/01_endless_generation.ipynb)
#
# # Unbounded generation in constant memory
#
# The model of this notebook was trained on 8,192 tokens at a time. Here it generates 12,000. With a
# StreamingLLM cache, time per token and memory do not depend on the length of the text. You first
# see how a plain sliding window and a full cache fail. Then you see how a few attention sinks
# prevent the failure, and what each token costs. The third cell lists the devices on which this
# notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[serve,train] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("01_endless_generation")

# %% [markdown]
# An empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package
# index is reached. Any Llama-family model can replace it: a Hub id, a folder or a GGUF file. The
# statements about generated text and about numbers apply to SmolLM2.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL or runtime.default_model())
context = llm.config.context
print(f"{llm.name}: {llm.config.layers} layers, trained on {context:,} tokens at a time")

# %% [markdown]
# ## Why a plain window fails
#
# A *sliding window* caches only the newest tokens, which bounds both memory and distances. But
# attention weights sum to one. A head that needs no other token must still put its weight
# somewhere, and most models learn to put it on the first tokens of the text. These tokens are
# called *attention sinks* ([StreamingLLM](https://arxiv.org/abs/2309.17453)). When a window evicts
# them, the model fails. The next cell generates a story with a window of 256 tokens and prints its
# end:

# %%
WINDOW, STREAMING = "window:window=256", "streaming:sinks=4,window=252"
PROMPT = "The old lighthouse keeper climbed the stairs every evening."
WRITE = {"max_new_tokens": runtime.size(1_000, 300), "temperature": 0.8, "seed": 1}
WRITE["ignore_eos"] = True
window = models.generate(llm, PROMPT, policy=WINDOW, **WRITE)
print("...", window.text[-500:])

# %% [markdown]
# ## The fix: cache the sinks
#
# A *streaming* cache stores the first tokens and the newest tokens. It never evicts the first
# tokens. Positions are those within the cache, so no distance exceeds the cache size. Four tokens
# are cached as sinks by default. The next cell has the same prompt, seed and number of slots:

# %%
streaming = models.generate(llm, PROMPT, policy=STREAMING, **WRITE)
print("...", streaming.text[-500:])

# %% [markdown]
# ## The loss on a novel
#
# One text shows little. So the model scores the beginning of *The Hound of the Baskervilles*; lower
# is better. A full cache stores every token. In a text longer than the trained context, queries
# attend over distances that never occurred in training.

# %%
from jaxkv.models.tools import compare

POLICIES = ["full", WINDOW, STREAMING]
ids = runtime.passage(llm, runtime.size(12_000, 2_000))
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.no_progress)
results = [compare.result(llm, name, scores[name], block=250) for name in POLICIES]
runtime.TextBox(compare.table(results))

# %% tags=["picture"]
caption = "The Hound of the Baskervilles, mean of 250 tokens per point"
runtime.shrink(compare.draw(results, context, caption, dpi=80))

# %% [markdown]
# **What to see.** The loss under the window (orange) jumps when the window evicts the first token.
# Under full attention (grey), the loss rises some way beyond the trained context (dashed). The
# streaming cache (blue) has the size of the window, but four of its slots store the first tokens,
# and its loss stays level. Within the trained context, full attention is better, because it sees the
# whole text.
#
# ## What a token costs
#
# With a full cache, each new token reads more keys than the one before, and memory grows with the
# text. With a bounded cache, both are constant. A full cache doubles its slots when they are full.
# It also reads its empty slots, so its curves rise in steps. On a GPU the times may hardly differ,
# because a GPU reads a cache of this size in parallel.

# %%
from time import perf_counter

import numpy as np


def cost(policy, length):
    """Microseconds of a token after `length` others, and bytes of the cache."""
    stream, times = models.Stream(llm, policy, tokens=length + 128), [perf_counter()]
    stream.prefill([ids[:length]])
    stream.finish_prefill()
    for _ in range(4):
        stream.decode(models.Sampling(), 32, ())
        times.append(perf_counter())
    return np.median(np.diff(times)[1:]) / 32 * 1e6, stream.state_bytes  # the first compiles


# %%
lengths = runtime.size([250, 1_000, 2_000, 4_000, 8_000], [250, 1_900])
costs = {policy: [cost(policy, length) for length in lengths] for policy in ("full", STREAMING)}

# %%
from jaxkv.models.tools import palette, pictures

figure, (left, right) = pictures.begin(7.5, 3.6, columns=2)
for (policy, measured), line in zip(costs.items(), palette.styles([*costs]), strict=True):
    microseconds, state_bytes = zip(*measured, strict=True)
    left.plot(lengths, microseconds, marker="o", ms=3, label=policy, **line)
    right.plot(lengths, [size / 2**20 for size in state_bytes], marker="o", ms=3, **line)
left.set(xlabel="tokens before it", ylabel="time of the next token (µs)", ylim=(0, None))
right.set(xlabel="tokens before it", ylabel="memory of the cache (MiB)", ylim=(0, None))
pictures.legend(figure, 2)
caption = f"one sequence, {llm.name}, {runtime.device()}; median of three rounds of 32 tokens"
runtime.picture(figure, "The cost of a token by the length of the text", caption)

# %% [markdown]
# ## Unbounded generation
#
# `models.stream` yields text while it is generated, until you stop the iteration. The next cell
# stops after 12,000 tokens. A model of this size repeats itself, but its language does not fall apart
# as it does under the window.

# %%
WRITE["max_new_tokens"] = runtime.size(12_000, 600)
story = "".join(models.stream(llm, PROMPT, policy=STREAMING, **WRITE))
print(f"{len(story.split()):,} words; the end:\n\n...{story[-500:]}")

# %% [markdown]
# ## What a streaming cache does not do
#
# A streaming cache does not extend the context of the model. Both at token 1,000 and at token
# 12,000, the model attends to the first 4 tokens and the newest 252. It cannot answer a question
# about evicted text. [02_what_each_cache_keeps](02_what_each_cache_keeps.ipynb) shows caches that
# also store a sample of the evicted tokens.
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
full, plain, sinks = (np.array([b["loss"] for b in row["blocks"]]) for row in results)
within = slice(2, context // 250 - 1)
(full_time, full_bytes), (time, state_bytes) = (np.transpose(costs[n]) for n in ("full", STREAMING))
runtime.verify(
    "" if llm.name.startswith("SmolLM2") else "another model",
    always={
        "a full cache grows": full_bytes[-1] > 2 * full_bytes[0],
        "a bounded cache does not": state_bytes[-1] == state_bytes[0],
        "full attention fails beyond the trained context": full[-4:].mean()
        > sinks[-4:].mean() + 0.3,
    },
    default_only={
        "a plain window fails": (plain - sinks)[2:].mean() > 0.3,
        "with sinks the loss stays near that of full attention": (sinks - full)[within].mean()
        < 0.3,
        "and level": abs(sinks[-8:].mean() - sinks[2:10].mean()) < 0.5,
        "the end of the story has more than 50 different words": len(set(story[-2_000:].split()))
        > 50,
    },
    times={
        "at the end, a token takes longer with a full cache": full_time[-1] > 1.2 * time[-1],
        "with a bounded cache, it takes as long as at the start": time[-1] < 1.5 * time[0],
    },
)
