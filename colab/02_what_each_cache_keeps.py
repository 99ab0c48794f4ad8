# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/02_what_each_cache_keeps.ipynb)
#
# # What each cache keeps
#
# One text read under every policy, and what is left of it in memory, token by token: what the model
# would answer from. The third cell says where it has been run, and how long it took.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("02_what_each_cache_keeps")

# %% [markdown]
# The model is the small one that comes with the package; any Llama-family model from the Hub can take
# its place.

# %%
from jaxkv import models
from jaxkv.evals.comparison import side_by_side

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
ids = runtime.passage(llm, side_by_side.prompt_of(side_by_side.SHORT))
print(len(ids), "tokens:", llm.tokenizer.decode(ids[:60]), "...")

# %% [markdown]
# ## Caches of one size
#
# All but `full` are set to hold as many tokens when they have read this text; the table counts them.
# Those of a stream (`window` to `balance-stream`) evict as they read. All of these but `h2o` number
# tokens by their rank in the cache and so have no end. `h2o` numbers them by their place in the text,
# and beyond the trained context
# [it falls apart](https://github.com/jaxkv/jaxkv/blob/main/README.md#caches) as `full` does. Those of a
# prompt (`balance` to `pyramidkv`) keep all of it until it is complete, and are then compressed once.

# %%
from jaxkv.colab import cached_tokens

EVERYTHING = ("magicpig", "topk", "topp", "oracle", "quest", "vattention")
settings = side_by_side.settings(side_by_side.SHORT)
found = cached_tokens.read(
    llm, ids, {n: text for n, text in settings.items() if n not in EVERYTHING}
)
cached_tokens.sizes(found, settings)

# %% [markdown]
# `stratified` and `balance-stream` hold some fewer at other lengths, for the slots of their samples
# fill up and are then halved. `pyramidkv` holds as many in the mean over its layers.
#
# A strip is the text from its beginning on the left to its end on the right. White is forgotten. Blue
# is cached, the mean over all layers and kv heads: pale where few heads hold a token, or dark where it
# counts for several, since a policy may let a token stand for others that are gone.

# %% tags=["picture"]
cached_tokens.draw(found)

# %% [markdown]
# - `window` has the end and nothing else, `streaming` four tokens of the beginning besides.
# - `reservoir` gives up half of its window for tokens drawn at random from all that has left it, other
#   ones in each head. `stratified` draws one from each stretch of four. `balance-stream` halves blocks
#   so that those cached stand for those gone; it holds more of what is recent.
# - `h2o`, `snapkv` and `pyramidkv` choose by attention, for each head its own: by what all queries
#   looked at so far, or by what the last queries of the prompt look at. `pyramidkv` gives early layers
#   more.
# - `uniform` and `balance` keep a quarter of what lies between the ends, each for four.
#
# ## In the text
#
# The first half of it, token by token; the darker the ground, the more weight.

# %%
cached_tokens.shade(
    llm, ids[: len(ids) // 2], found, ["streaming", "stratified", "balance", "snapkv"]
)

# %% [markdown]
# Of this half `streaming` has its first four tokens and nothing else; the very first marks the
# beginning and has no letters.
#
# ## What it would answer from
#
# The passage says what a stick is called and what is engraved on it. Once all of it is read, in how
# many of the heads are these words still there?

# %%
places = cached_tokens.places(
    llm, ids, {"the stick": "Penang", "the engraving": "To James Mortimer"}
)
places |= {"the last ten tokens": slice(len(ids) - 10, len(ids))}
cached_tokens.shares(found, places)

# %% [markdown]
# The end is there in all of them. With our model both have left `window` and `streaming`; where a
# sample of the whole text is cached (`reservoir` to `uniform`) some heads have a part of them. To be
# held is not yet to be used: a token that few heads hold may be of no use to them, and a model this
# small uses little of what is far away.
# [How often something said long ago is found again](https://github.com/jaxkv/jaxkv/blob/main/evals/results/recall.png)
# was measured with models that were trained to look for it.
#
# ## Caches that keep everything
#
# `magicpig`, `topk`, `topp`, `oracle`, `quest` and `vattention` evict nothing, and choose for each
# query which of the keys it attends to. What they spare is reading: see
# [04_sampling_beats_topk](04_sampling_beats_topk.ipynb). The last five take the memory of `full`;
# `magicpig` has tables besides, and takes more, with our model several times as much for a prompt this
# short.

# %%
some = EVERYTHING[: runtime.size(6, 2)]
whole = cached_tokens.read(llm, ids, {name: settings[name] for name in some})
cached_tokens.sizes(whole, settings)

# %% [markdown]
# The next cell checks these results and fails if one of them does not hold.

# %%
import numpy as np

import jaxkv

BUDGET, SINKS, WINDOW = side_by_side.BUDGET, side_by_side.SINKS, side_by_side.WINDOW
STREAMS, DRAWN = ("window", "streaming"), ("reservoir", "stratified", "balance-stream")
THINNED, CHOSEN = ("uniform", "balance"), ("h2o", "snapkv", "pyramidkv")
hold = {name: held.weights > 0 for name, held in found.items()}
mean = {name: held.counts.mean() / BUDGET for name, held in found.items() if name != "full"}
between = {name: one[:, :, SINKS : len(ids) - WINDOW] for name, one in hold.items()}
fours = between["stratified"].reshape(*between["stratified"].shape[:2], -1, 4).sum(axis=3)
older, newer = np.split(between["balance-stream"], 2, axis=2)
by_layer = found["pyramidkv"].counts.mean(axis=1)
reach = {name: jaxkv.policy(settings[name]).max_lookback for name in (*STREAMS, *DRAWN, "h2o")}
everywhere = {name: np.flatnonzero(hold[name].any(axis=(0, 1))).tolist() for name in STREAMS}
newest = list(range(len(ids) - BUDGET, len(ids)))
over_full = {
    name: held.state_bytes / found["full"].state_bytes for name, held in (found | whole).items()
}
small = [over_full[name] for name in mean]
said = {name: [held.share(place) for place in places.values()] for name, held in found.items()}

always = {
    "full and those of the last table hold every token": all(
        (held.weights == 1).all() for held in (found["full"], *whole.values())
    ),
    "the others hold as many as they are set to, or nearly": all(
        abs(mean[name] - 1) < 0.02 for name in mean if name != "pyramidkv"
    ),
    "h2o alone of those of a stream has an end": all(
        (most <= BUDGET) != (name == "h2o") for name, most in reach.items()
    ),
    "window has the end and nothing else": everywhere["window"] == newest,
    "streaming has four first tokens besides": everywhere["streaming"] == [0, 1, 2, 3, *newest[4:]],
    "those with a sample have the newest tokens whole": all(
        hold[name][:, :, 1 - WINDOW :].all() for name in DRAWN
    ),
    "in stratified no stretch of four has two": fours.max() == 1 and fours.mean() > 0.95,
    "balance-stream holds more of what is recent": newer.sum() > 1.5 * older.sum(),
    "uniform and balance keep a quarter of what lies between": all(
        abs(between[name].mean() - 0.25) < 0.01 for name in THINNED
    ),
    "and each counts for four": all(
        set(np.unique(found[name].weights.round(3))) == {0, 1, 4} for name in THINNED
    ),
    "the end is there in all": all(
        held.share(places["the last ten tokens"]) == 1 for held in found.values()
    ),
    "what chooses anew takes the memory of full, magicpig more": all(
        over_full[name] > 1 if name == "magicpig" else abs(over_full[name] - 1) < 0.01
        for name in whole
    ),
}
ours = {
    "pyramidkv holds as many in the mean": abs(mean["pyramidkv"] - 1) < 0.02,
    "it gives early layers more": all(np.diff(by_layer) < 0),
    "heads differ in what they draw or choose": all(
        (between[name] != between[name][:, :1]).any() for name in ("reservoir", *CHOSEN)
    ),
    "all but full take the same memory, within a tenth": max(small) < 1.1 * min(small),
    "stick and engraving have left window and streaming": len(places) == 3
    and not any(sum(said[name][:2]) for name in STREAMS),
    "where a sample is kept some heads have a part of them": all(
        0 < share < 1 for name in (*DRAWN, *THINNED) for share in said[name][:2]
    ),
    "magicpig takes several times the memory of full": over_full["magicpig"] > 3,
}
runtime.verify(MODEL, always, ours)
