# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/02_what_each_cache_keeps.ipynb)
#
# # Which tokens each cache stores
#
# Every cache policy reads the same text. This notebook shows which tokens are cached afterwards. The
# model can use only these tokens for an answer. The third cell lists the devices on which this
# notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("02_what_each_cache_keeps")

# %% [markdown]
# An empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package
# index is reached. Any Llama-family model can replace it: a Hub id, a folder or a GGUF file.

# %%
from jaxkv import models
from jaxkv.evals.comparison import side_by_side

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL or runtime.default_model())
ids = runtime.passage(llm, side_by_side.prompt_of(side_by_side.SHORT))
print(len(ids), "tokens:", llm.tokenizer.decode(ids[:60]), "...")

# %% [markdown]
# ## Caches of equal size
#
# The settings of all policies except `full` are chosen such that they cache the same number of
# tokens after this text. The table counts these tokens. There are two families:
#
# - **Streaming policies** (`window` to `balance-stream`) evict tokens while they read. All except
#   `h2o` use positions within the cache, so a text may have any length. `h2o` uses absolute
#   positions. Beyond the trained context, [it
#   fails](https://github.com/jaxkv/jaxkv/blob/main/docs/policies.md), like `full`.
# - **Prompt compression** (`balance` to `keydiff`) caches the whole prompt during prefill and
#   compresses it once, at the end of prefill.

# %%
from jaxkv.colab import cached_tokens

SPARSE = ("magicpig", "topk", "topp", "oracle", "quest", "vattention")
settings = side_by_side.settings(side_by_side.SHORT)
coverages = cached_tokens.measure_coverage(
    llm, ids, {n: text for n, text in settings.items() if n not in SPARSE}
)
cached_tokens.size_table(coverages, settings)

# %% [markdown]
# At other text lengths, `stratified` and `balance-stream` cache slightly fewer tokens, because they
# halve their samples whenever the slots are full. `pyramidkv` meets the budget on average over its
# layers, within 5 %.
#
# In the plot below, each strip is the text from start (left) to end (right). White tokens are
# evicted and blue tokens are cached. The colour shows the weight of a token, averaged over all
# layers and KV heads. A token is pale if few heads cache it. It is dark if its weight is above one:
# with some policies, a cached token counts for several evicted tokens.

# %% tags=["picture"]
cached_tokens.draw_strips(coverages)

# %% [markdown]
# **What to see.**
#
# - `window` caches only the end, and `streaming` also the first four tokens.
# - `reservoir` uses half of its slots for tokens drawn at random from all evicted tokens, separately
#   for each KV head. `stratified` draws one token of every four. `balance-stream` halves blocks such
#   that the remaining tokens represent the dropped ones. It caches more of the recent text.
# - `h2o`, `snapkv` and `pyramidkv` select tokens by attention score, per head. `h2o` sums the
#   attention of all queries so far. `snapkv` and `pyramidkv` use the attention of the prompt's last
#   queries. `pyramidkv` gives more slots to early layers.
# - `expected-attention` estimates the attention of future queries from the prompt's queries.
#   `keydiff` selects the keys that differ most from the mean key. Neither has a window, so they may
#   evict the last tokens.
# - `uniform` and `balance` cache the first and the last tokens and a quarter of those between. Each
#   of this quarter counts for four.
#
# ## The cached tokens in the text
#
# The next cell shows the first half of the text. A darker background means a higher weight.

# %%
cached_tokens.highlight(
    llm, ids[: len(ids) // 2], coverages, ["streaming", "stratified", "balance", "snapkv"]
)

# %% [markdown]
# Of this half, `streaming` caches only the first four tokens.
#
# ## Can the model still see the answer?
#
# The passage names a stick and quotes the engraving on it. The next cell shows in which fraction of
# the heads these words are still cached after the whole passage.

# %%
places = cached_tokens.locate_phrases(
    llm, ids, {"the stick": "Penang", "the engraving": "To James Mortimer"}
)
places |= {"the last ten tokens": slice(len(ids) - 10, len(ids))}
cached_tokens.share_table(coverages, places)

# %% [markdown]
# Every policy but `expected-attention` and `keydiff` caches the last ten tokens in all heads. With
# the default model, `window` and `streaming` have evicted both phrases. Policies with a sample of
# the whole text (`reservoir` to `uniform`) still cache parts of the phrases in some heads. A cached
# token need not be used: the few heads that cache it may not attend to it, and small models
# attend little to distant tokens.
# [How often a distant fact is
# recalled](https://github.com/jaxkv/jaxkv/blob/main/evals/results/recall.png) was measured with
# models trained for that task.
#
# ## Caches that store every token
#
# `magicpig`, `topk`, `topp`, `oracle`, `quest` and `vattention` are sparse attention: they evict no
# token and select keys for each query ([04_sampling_beats_topk](04_sampling_beats_topk.ipynb)).
# `magicpig` finds keys through hash tables. The other five are oracle baselines, which read every
# key to select some. They need as much memory as `full`. `magicpig` also stores its tables. With the
# default model and a prompt this short, it needs several times as much memory as `full`.

# %%
sparse_names = SPARSE[: runtime.size(6, 2)]
sparse = cached_tokens.measure_coverage(llm, ids, {name: settings[name] for name in sparse_names})
cached_tokens.size_table(sparse, settings)

# %% [markdown]
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
import numpy as np

import jaxkv

BUDGET, SINKS, WINDOW = side_by_side.BUDGET, side_by_side.SINKS, side_by_side.WINDOW
WINDOWS, SAMPLES = ("window", "streaming"), ("reservoir", "stratified", "balance-stream")
COMPRESSED, SCORED = ("uniform", "balance"), ("h2o", "snapkv", "pyramidkv")
WITHOUT_WINDOW = ("expected-attention", "keydiff")
is_cached = {name: coverage.weights > 0 for name, coverage in coverages.items()}
mean = {
    name: coverage.counts.mean() / BUDGET for name, coverage in coverages.items() if name != "full"
}
between = {name: mask[:, :, SINKS : len(ids) - WINDOW] for name, mask in is_cached.items()}
fours = between["stratified"].reshape(*between["stratified"].shape[:2], -1, 4).sum(axis=3)
older, newer = np.split(between["balance-stream"], 2, axis=2)
by_layer = coverages["pyramidkv"].counts.mean(axis=1)
streams = (*WINDOWS, *SAMPLES, "h2o")
lookback = {name: jaxkv.policy(settings[name]).max_lookback for name in streams}
anywhere = {name: np.flatnonzero(is_cached[name].any(axis=(0, 1))).tolist() for name in WINDOWS}
newest = list(range(len(ids) - BUDGET, len(ids)))
over_full = {
    name: coverage.state_bytes / coverages["full"].state_bytes
    for name, coverage in (coverages | sparse).items()
}
small = [over_full[name] for name in mean]
share_of = {
    name: [coverage.share(place) for place in places.values()]
    for name, coverage in coverages.items()
}

always = {
    "full and sparse attention cache every token": all(
        (coverage.weights == 1).all() for coverage in (coverages["full"], *sparse.values())
    ),
    "the other policies meet their budget within 2 %": all(
        abs(mean[name] - 1) < 0.02 for name in mean if name != "pyramidkv"
    ),
    "of the streaming policies, only h2o looks back further than its budget": all(
        (furthest <= BUDGET) != (name == "h2o") for name, furthest in lookback.items()
    ),
    "window caches only the newest tokens": anywhere["window"] == newest,
    "streaming also caches the first four": anywhere["streaming"] == [0, 1, 2, 3, *newest[4:]],
    "policies with a sample cache all of the newest tokens": all(
        is_cached[name][:, :, 1 - WINDOW :].all() for name in SAMPLES
    ),
    "stratified caches at most one token of each four": fours.max() == 1 and fours.mean() > 0.95,
    "balance-stream caches more of the recent text": newer.sum() > 1.5 * older.sum(),
    "uniform and balance cache a quarter of the tokens between": all(
        abs(between[name].mean() - 0.25) < 0.01 for name in COMPRESSED
    ),
    "and each counts for four": all(
        set(np.unique(coverages[name].weights.round(3))) == {0, 1, 4} for name in COMPRESSED
    ),
    "every policy but two caches the last ten tokens": all(
        (coverage.share(places["the last ten tokens"]) == 1) != (name in WITHOUT_WINDOW)
        for name, coverage in coverages.items()
    ),
    "sparse attention takes the memory of full, magicpig more": all(
        over_full[name] > 1 if name == "magicpig" else abs(over_full[name] - 1) < 0.01
        for name in sparse
    ),
}
default_only = {
    "pyramidkv meets its budget on average, within 5 %": abs(mean["pyramidkv"] - 1) < 0.05,
    "it gives more slots to early layers": all(np.diff(by_layer) < 0),
    "heads differ in their samples and selections": all(
        (between[name] != between[name][:, :1]).any() for name in ("reservoir", *SCORED)
    ),
    "all but full take the same memory, within a tenth": max(small) < 1.1 * min(small),
    "window and streaming have evicted stick and engraving": len(places) == 3
    and not any(sum(share_of[name][:2]) for name in WINDOWS),
    "with a sample, some heads cache parts of them": all(
        0 < share < 1 for name in (*SAMPLES, *COMPRESSED) for share in share_of[name][:2]
    ),
    "magicpig takes several times the memory of full": over_full["magicpig"] > 3,
}
runtime.verify(MODEL, always, default_only)
