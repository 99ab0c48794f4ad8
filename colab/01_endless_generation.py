# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/01_endless_generation.ipynb)
#
# # Text without end in a fixed memory
#
# A model that was trained on 512 tokens at a time writes 20,000, and the last word costs as much time
# and memory as the thousandth. Runs on a CPU, a GPU or a TPU; the third cell says how many minutes.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from evals import runtime

runtime.begin("01_endless_generation")

# %% [markdown]
# The model is a small one of our own, trained on old novels; it comes with the package. Put the Hub
# id of any Llama-family model into the field to take that one.

# %%
import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
context = llm.config.context
print(f"{llm.folder.name}: {llm.config.layers} layers, trained on {context} tokens at a time")

# %% [markdown]
# ## First, how it fails
#
# The usual cache keeps every token. Beyond the length that the model was trained on it meets
# distances that it has never seen, and the text falls apart. This is how it ends after three times
# that length:

# %%
LENGTH = runtime.size(3 * context, 2 * context)
WRITE = {"max_new_tokens": LENGTH, "temperature": 0.8, "seed": 1, "ignore_eos": True}
PROMPT = "Once upon a time"
full = models.generate(llm, PROMPT, policy="full", **WRITE)
print("...", full.text[-400:])

# %% [markdown]
# To keep only the newest tokens, a *window*, bounds the memory and the distances. But attention
# weights add up to one: a head that finds nothing to look at must put its weight somewhere, and many
# models learn to put it on the first tokens of a text, the *attention sinks*. A window loses them,
# and the model falls apart at that moment ([StreamingLLM](https://arxiv.org/abs/2309.17453), which
# saw it in models of billions of weights). It can be seen in a model of one layer, trained on the
# spot with a learnable sink token in front of every sample. It reads letters, some of which say
# "copy the letter before"; at all others its head has nothing to do.

# %%
import dataclasses
import tempfile
from pathlib import Path

from evals import backcopy, compare
from models.pretrain import pretrain

folder = Path(tempfile.mkdtemp())
letters = backcopy.write(backcopy.Chain(0), folder / "data")
recipe = dataclasses.replace(backcopy.recipe_of("token", seed=0), steps=runtime.size(800, 300))
small = models.load(pretrain(recipe, letters, folder / "run", tell=lambda line: None))
print(
    f"a model of {small.config.layers} layer, trained on {small.config.context} letters at a time"
)

# %%
SMALL = ["full", "window:window=24", "streaming:sinks=1,window=23"]
ids = [small.config.bos, *letters.run("valid", 0, 4_000).tolist()]
scores = compare.compare(small, ids, SMALL, chunk=None, seed=0, watch=runtime.quietly)
copied = [compare.result(small, name, scores[name], block=100) for name in SMALL]
caption = "letters that the model has not seen, mean of 100 a point"
runtime.shrink(compare.draw(copied, small.config.context, caption, dpi=80))

# %% [markdown]
# The orange line lies above the blue one: without its sink the head looks at letters that disturb, and
# copies go wrong. Large models fail altogether; of Llama-2-13B the paper has a perplexity of 5158 in
# place of 5.40 (Table 1).
#
# ## What mends it
#
# Keep the sink beside the newest tokens and number all by their place in the cache: *streaming*, the
# blue line. Most models were trained without a sink token and use some of the first tokens, so four
# are kept unless told otherwise. The same model as at first, under a cache of 256 tokens:

# %%
STREAMING = "streaming:sinks=4,window=252"
streaming = models.generate(llm, PROMPT, policy=STREAMING, **WRITE)
print("...", streaming.text[-400:])

# %% [markdown]
# How well does it predict a text that somebody else wrote? Here it is the beginning of *The Hound of
# the Baskervilles*, which the model has not seen. (The default model is small and has grown no sink
# that it needs: a window alone does it no harm. Which models are hurt cannot be seen from outside,
# and four tokens cost nothing.)

# %%
POLICIES = ["full", "window:window=256", STREAMING]
ids = runtime.passage(llm, runtime.size(8_000, 2_000))
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.quietly)
results = [compare.result(llm, name, scores[name], block=250) for name in POLICIES]
runtime.Text(compare.table(results))

# %% tags=["picture"]
caption = "The Hound of the Baskervilles, mean of 250 tokens a point"
runtime.shrink(compare.draw(results, context, caption, dpi=80))

# %% [markdown]
# ## What a token costs
#
# With every token kept, each new one has more to read and the cache grows; a bounded one stays as it
# is, however long the text.

# %%
from evals import growth

lengths = runtime.size([500, 2_000, 4_000, 8_000, 14_000], [200, 400, 1_900])
text = runtime.passage(llm, lengths[-1])
costs = growth.measure(llm, text, ["full", STREAMING], lengths)
growth.draw(costs, f"one row, {runtime.device()}; the median of three rounds")

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
# The cell below fails if anything above was not as it says.

# %%
copying, reading = (
    {row["policy"].split(":")[0]: [block["loss"] for block in row["blocks"]] for row in rows}
    for rows in (copied, results)
)
assert min(copying["full"][5:]) > max(copying["window"]) > 0
assert sum(copying["window"]) > 1.01 * sum(copying["streaming"])
assert reading["full"][-1] > reading["streaming"][-1] + 0.5
assert costs["full"][-1].state_bytes > 2 * costs["full"][0].state_bytes
assert costs[STREAMING][-1].state_bytes == costs[STREAMING][0].state_bytes
assert len(set(story[-2_000:].split())) > 50
print("as it should be")
