# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/01_endless_generation.ipynb)
#
# # Unbounded generation in constant memory
#
# The model of this notebook was trained on 512 tokens at a time. Here it generates 20,000 tokens.
# With a StreamingLLM cache, time per token and memory do not depend on the length of the text. You
# first see how a full cache fails and why a plain sliding window can fail too. Then you see how a
# few attention sinks prevent the failure, and what each token costs. The third cell lists the
# devices on which this notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("01_endless_generation")

# %% [markdown]
# The default model comes with the package. It is small and was trained on old novels. To use
# another model, put the Hub id of any Llama-family model into the field below. The statements about
# generated text and about numbers apply to the default model.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
context = llm.config.context
print(f"{llm.name}: {llm.config.layers} layers, trained on {context:,} tokens at a time")

# %% [markdown]
# ## How full attention fails
#
# A full KV cache stores every token. If the text is longer than the trained context, queries attend
# over relative distances that never occurred in training, and the output degenerates. The next cell
# generates three times as many tokens as the trained context has (at most 6,000) and prints the end
# of the text:

# %%
LENGTH = min(runtime.size(3, 2) * context, runtime.size(6_000, 1_200))
WRITE = {"max_new_tokens": LENGTH, "temperature": 0.8, "seed": 1, "ignore_eos": True}
PROMPT = "Once upon a time"
full = models.generate(llm, PROMPT, policy="full", **WRITE)
print("...", full.text[-400:])

# %% [markdown]
# ## Why a plain window can fail
#
# A *sliding window* caches only the newest tokens, which bounds both memory and distances. But
# attention weights sum to one. A head that needs no other token must still put its weight
# somewhere, and many models learn to put it on the first tokens of the text. These tokens are
# called *attention sinks*. When a window evicts them, the model fails.
# [StreamingLLM](https://arxiv.org/abs/2309.17453) observed this in models with billions of weights:
# with a plain window, Llama-2-13B has a perplexity of 5158 instead of 5.40 (Table 1).
#
# A model with a single layer shows the effect. The next cell trains one with a learnable sink token
# in front of every sample. The training data are letters. Some letters are triggers: the letter
# after a trigger is a copy of the letter before it. At all other letters, the copying head needs no
# other letter.

# %%
import tempfile
from pathlib import Path

from jaxkv.colab import loss_by_position, sink_variants

trained, letters = sink_variants.train(
    ["token"], runtime.size(800, 300), seed=2, folder=Path(tempfile.mkdtemp())
)
small = trained["token"]
rows = letters.run("valid", 0, runtime.size(400, 100) * 120).reshape(-1, 120).tolist()
print(f"{small.config.layers} layer, trained on {small.config.context} letters at a time")

# %% tags=["picture"]
SMALL = ["full", "window:window=24", "streaming:sinks=1,window=23"]
copying = loss_by_position.losses(small, [[small.config.bos, *row] for row in rows], SMALL)
loss_by_position.draw(
    copying,
    {"sink evicted": 24, "trained context": small.config.context},
    f"mean of {len(rows)} held-out texts, and two standard errors",
)

# %% [markdown]
# **What to see.** The loss under the window (orange) jumps at the position where the window evicts
# the sink token. Under full attention (grey), the loss rises shortly after the end of the trained
# context. The streaming cache (blue) has the size of the window, but one of its slots stores the sink,
# and its loss stays level. The size of the jump depends on the training run: of [three models that
# differ only in the seed](https://github.com/jaxkv/jaxkv/blob/main/evals/results/backcopy.png)
# (`token`, 0+24), this model has the largest.
#
# ## The fix: cache the sinks
#
# A *streaming* cache stores the first tokens and the newest tokens. It never evicts the first
# tokens. Positions are those within the cache, so no distance exceeds the cache size. Most models
# were trained without a dedicated sink token and use several of the first tokens, so four tokens are
# cached as sinks by default. In the next cell, the default model generates as many tokens as before,
# with a cache of 256 tokens:

# %%
STREAMING = "streaming:sinks=4,window=252"
streaming = models.generate(llm, PROMPT, policy=STREAMING, **WRITE)
print("...", streaming.text[-400:])

# %% [markdown]
# Next, the model scores a text that it has not seen: the beginning of *The Hound of the
# Baskervilles*. The table and the plot show the loss; lower is better. Under full attention, the
# loss rises beyond the trained context. The default model is small and has learnt no attention sink,
# so its loss with a plain window is as low as with a streaming cache. You do not know in advance
# whether a model needs its sinks, and four more tokens cost almost nothing.

# %%
from jaxkv.models import compare

POLICIES = ["full", "window:window=256", STREAMING]
ids = runtime.passage(llm, runtime.size(8_000, 2_000))
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.no_progress)
results = [compare.result(llm, name, scores[name], block=250) for name in POLICIES]
runtime.TextBox(compare.table(results))

# %%
caption = "The Hound of the Baskervilles, mean of 250 tokens per point"
runtime.shrink(compare.draw(results, context, caption, dpi=80))

# %% [markdown]
# ## What a token costs
#
# With a full cache, each new token reads more keys than the one before, and memory grows with the
# text. With a bounded cache, both are constant. A full cache doubles its slots when they are full.
# It also reads its empty slots, so its curves rise in steps. On a GPU the times may hardly differ,
# because a GPU reads a cache of this size in parallel.

# %%
from jaxkv.colab import cost_by_length

text = runtime.passage(llm, runtime.size(14_000, 1_900))
lengths = [len(text) // part for part in runtime.size([28, 7, 4, 2, 1], [8, 4, 1])]
costs = cost_by_length.measure(llm, text, ["full", STREAMING], lengths)
cost_by_length.draw(costs, f"one sequence, {runtime.device()}; median of three rounds")

# %% [markdown]
# ## Unbounded generation
#
# `models.stream` yields text while it is generated, until you stop the iteration. The next cell
# stops after 20,000 tokens.

# %%
tokens = runtime.size(20_000, 600)
pieces = models.stream(
    llm, PROMPT, policy=STREAMING, max_new_tokens=tokens, temperature=0.8, seed=7, ignore_eos=True
)
story = "".join(pieces)
print(f"{len(story.split()):,} words; the end:\n\n...{story[-400:]}")

# %% [markdown]
# ## What a streaming cache does not do
#
# A streaming cache does not extend the context of the model. Both at token 1,000 and at token
# 20,000, the model attends to the first 4 tokens and the newest 252. It cannot answer a question
# about evicted text. [02_what_each_cache_keeps](02_what_each_cache_keeps.ipynb) shows caches that
# also store a sample of the evicted tokens.
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
dense, window, sink = (each.mean(axis=0) for each in copying.values())
before, at_once, beyond = slice(20), slice(26, 34), slice(80, None)
reading = {row["policy"]: row["blocks"][-1]["loss"] for row in results}
gap = reading[STREAMING] - reading[POLICIES[1]]
begin, end = ({policy: each[at] for policy, each in costs.items()} for at in (0, -1))
times = end["full"].microseconds / end[STREAMING].microseconds
steady = end[STREAMING].microseconds / begin[STREAMING].microseconds
growth_of_full = end["full"].state_bytes / begin["full"].state_bytes
runtime.verify(
    MODEL,
    always={
        "until it evicts the sink, a window equals streaming": abs(window - sink)[before].max()
        < 1e-3,
        "then the window fails at once": (window - sink)[at_once].mean() > 0.1,
        "full attention fails beyond the trained context": (dense - sink)[beyond].mean() > 0.1,
        "with the sink cached, the loss stays level": abs(
            sink[beyond].mean() - sink[at_once].mean()
        )
        < 0.15,
        "a full cache grows": growth_of_full > 2,
        "a bounded cache does not": end[STREAMING].state_bytes == begin[STREAMING].state_bytes,
    },
    ours={
        "full attention fails on the novel": reading["full"] > reading[STREAMING] + 0.5,
        "four sinks cost almost nothing": abs(gap) < 0.15,
        "the story does not repeat itself": len(set(story[-2_000:].split())) > 50,
    },
    times={
        "at the end, a token takes over twice as long with a full cache": times > 2,
        "with a bounded cache, it takes as long as at the start": steady < 1.5,
    },
)
