# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/01_endless_generation.ipynb)
#
# # Unbounded generation in constant memory
#
# A model that was trained on 512 tokens at a time writes 20,000, and the last word costs as much time
# and memory as the thousandth. The third cell says where it has been run, and how long it took.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("01_endless_generation")

# %% [markdown]
# The model is a small one of our own, trained on old novels; it comes with the package. Put the Hub
# id of any Llama-family model into the field to take that one. (What the text below says of texts and
# numbers is of our own.)

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
context = llm.config.context
print(f"{llm.folder.name}: {llm.config.layers} layers, trained on {context:,} tokens at a time")

# %% [markdown]
# ## First, how it fails
#
# The usual cache keeps every token. Beyond the length that the model was trained on it meets
# distances that it has never seen, and the text falls apart. This is how it ends after three times
# that length (or 6,000 tokens, where that is less):

# %%
LENGTH = min(runtime.size(3, 2) * context, runtime.size(6_000, 1_200))
WRITE = {"max_new_tokens": LENGTH, "temperature": 0.8, "seed": 1, "ignore_eos": True}
PROMPT = "Once upon a time"
full = models.generate(llm, PROMPT, policy="full", **WRITE)
print("...", full.text[-400:])

# %% [markdown]
# To keep only the newest tokens, a *window*, bounds the memory and the distances. But attention
# weights add up to one: a head that finds nothing to look at must put its weight somewhere, and many
# models learn to put it on the first tokens of a text, the *attention sinks*. A window loses them,
# and at that moment the model falls apart ([StreamingLLM](https://arxiv.org/abs/2309.17453), which
# saw it in models of billions of weights: of Llama-2-13B it has a perplexity of 5158 in place of
# 5.40, Table 1).
#
# It can be seen in a model of one layer, trained on the spot with a learnable sink token in front of
# every sample. It reads letters, some of which say "copy the letter before"; at all others its head
# has nothing to do.

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
    {"sink gone": 24, "trained context": small.config.context},
    f"mean of {len(rows)} texts that the model has not seen, and two standard errors",
)

# %% [markdown]
# The window (orange) fails with the very token that pushes the sink out of it. Full attention (grey)
# fails a little beyond the trained context. The blue line keeps the sink beside a window as short as
# the other, and nothing happens. How much a window costs such a model depends on how it was trained: of
# [three that differ in the seed alone](https://github.com/jaxkv/jaxkv/blob/main/evals/results/backcopy.png)
# (`token`, 0+24) this one loses most.
#
# ## What mends it
#
# Keep the sink beside the newest tokens and number all by their place in the cache: *streaming*. Most
# models were trained without a sink token and use some of the first tokens, so four are cached unless
# set otherwise. The same model as at first, under a cache of 256 tokens:

# %%
STREAMING = "streaming:sinks=4,window=252"
streaming = models.generate(llm, PROMPT, policy=STREAMING, **WRITE)
print("...", streaming.text[-400:])

# %% [markdown]
# How well does it predict a text that somebody else wrote? Here it is the beginning of *The Hound of
# the Baskervilles*, which the model has not seen. (The default model is small and has grown no sink
# that it needs: a window alone does it no harm. Which models are hurt cannot be seen from outside,
# and four tokens cost next to nothing.)

# %%
from jaxkv.models import compare

POLICIES = ["full", "window:window=256", STREAMING]
ids = runtime.passage(llm, runtime.size(8_000, 2_000))
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.quietly)
results = [compare.result(llm, name, scores[name], block=250) for name in POLICIES]
runtime.Text(compare.table(results))

# %%
caption = "The Hound of the Baskervilles, mean of 250 tokens a point"
runtime.shrink(compare.draw(results, context, caption, dpi=80))

# %% [markdown]
# ## What a token costs
#
# With every token kept, each new one has more to read and the cache grows; a bounded one stays as it
# is, however long the text. (A full cache makes room by doubling, and reads its empty slots too: so its
# lines climb in steps. On a GPU, which reads so small a cache at once, times may hardly differ.)

# %%
from jaxkv.colab import cost_by_length

text = runtime.passage(llm, runtime.size(14_000, 1_900))
lengths = [len(text) // part for part in runtime.size([28, 7, 4, 2, 1], [8, 4, 1])]
costs = cost_by_length.measure(llm, text, ["full", STREAMING], lengths)
cost_by_length.draw(costs, f"one row, {runtime.device()}; the median of three rounds")

# %% [markdown]
# ## Without end
#
# `models.stream` yields text as it is made. It stops when you do; here after 20,000 tokens.

# %%
tokens = runtime.size(20_000, 600)
pieces = models.stream(
    llm, PROMPT, policy=STREAMING, max_new_tokens=tokens, temperature=0.8, seed=7, ignore_eos=True
)
story = "".join(pieces)
print(f"{len(story.split()):,} words; the last of them:\n\n...{story[-400:]}")

# %% [markdown]
# ## What it does not do
#
# The model sees the first four tokens and the newest 252, at token 1,000 and at token 20,000 alike.
# What has left the window is gone: no question about it has an answer in this cache. Caches that keep
# a sample of it are in [02_what_each_cache_keeps](02_what_each_cache_keeps.ipynb).
#
# The next cell checks these results and fails if one of them does not hold.

# %%
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
        "until its sink is gone a window is as good": abs(window - sink)[before].max() < 1e-3,
        "then it fails at once": (window - sink)[at_once].mean() > 0.1,
        "full attention fails beyond the context": (dense - sink)[beyond].mean() > 0.1,
        "with the sink nothing happens": abs(sink[beyond].mean() - sink[at_once].mean()) < 0.15,
        "a full cache grows": growth_of_full > 2,
        "a bounded one does not": end[STREAMING].state_bytes == begin[STREAMING].state_bytes,
    },
    ours={
        "full attention loses the novel": reading["full"] > reading[STREAMING] + 0.5,
        "four sinks cost next to nothing": abs(gap) < 0.15,
        "the story is no loop": len(set(story[-2_000:].split())) > 50,
    },
    times={
        "in the end a token costs a full cache over twice as much": times > 2,
        "and a bounded one what it did at first": steady < 1.5,
    },
)
