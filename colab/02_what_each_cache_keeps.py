# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/02_what_each_cache_keeps.ipynb)
#
# # Which tokens each cache stores, and whether balance beats chance
#
# Every cache policy reads the same text. This notebook shows which tokens are cached afterwards: the
# model can use only these tokens for an answer. Some policies choose at random, some by attention, and
# [BalanceKV](https://arxiv.org/abs/2502.07861) such that the cached tokens resemble the dropped ones.
# The second half shows for which keys this is better than a random sample. The third cell lists the
# devices on which this notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[serve,train] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("02_what_each_cache_keeps")

# %% [markdown]
# An empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package
# index is reached. Any Llama-family model can replace it: a Hub id, a folder or a GGUF file.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL or runtime.default_model())
TOKENS, BUDGET = 317, 128
ids = runtime.passage(llm, TOKENS)
print(len(ids), "tokens:", llm.tokenizer.decode(ids[:60]), "...")

# %% [markdown]
# ## Caches of equal size
#
# A policy string names a policy and its settings. The settings below are chosen such that every policy
# but `full` caches 128 tokens per KV head after this text. There are two families:
#
# - **Streaming policies** evict tokens while they read. All except `h2o` use positions within the
#   cache, so a text may have any length. `h2o` uses absolute positions. Beyond the trained context, [it
#   fails](https://github.com/jaxkv/jaxkv/blob/main/docs/policies.md), like `full`.
# - **Prompt compression** caches the whole prompt during prefill and compresses it once, at the end
#   of prefill.
#
# A third family, sparse attention, caches every token and selects keys for each query
# ([03_sampling_beats_topk](03_sampling_beats_topk.ipynb)).

# %%
SAMPLE, HALVED = "sinks=4,window=60", f"sinks=4,window=61,rounds=2,start={TOKENS}"
POLICIES = {
    "full": f"full:start={TOKENS}",
    "window": "window:window=128",
    "streaming": "streaming:sinks=4,window=124",
    "h2o": "h2o:heavy=64,window=64",
    "reservoir": f"reservoir:{SAMPLE},sample=64",
    "stratified": f"stratified:{SAMPLE},sample=64",
    "balance-stream": f"balance-stream:{SAMPLE},levels=3,block=32",
}

# %%
POLICIES |= {
    "balance": f"balance:{HALVED}",
    "uniform": f"uniform:{HALVED}",
    "snapkv": f"snapkv:capacity=128,window=61,start={TOKENS}",
    "pyramidkv": f"pyramidkv:capacity=128,window=61,start={TOKENS}",
    "expected-attention": f"expected-attention:capacity=128,sinks=4,start={TOKENS}",
    "keydiff": f"keydiff:capacity=128,start={TOKENS}",
}

# %%
from jaxkv.colab import cached_tokens

coverages = cached_tokens.measure_coverage(llm, ids, POLICIES)
cached_tokens.size_table(coverages, POLICIES)

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
import numpy as np

from jaxkv.models.tools import palette, pictures

figure, axes = pictures.begin(6.5, 5.0)
means, look = [coverage.mean for coverage in coverages.values()], {"vmin": 0, "vmax": 4}
image = axes.imshow(means, aspect="auto", cmap="Blues", interpolation="nearest", **look)
axes.set_yticks(range(len(coverages)), coverages)
axes.grid(False)
axes.set(xlabel="position in the text (tokens)")
axes.hlines(np.arange(len(coverages) - 1) + 0.5, -0.5, TOKENS - 0.5, color="white", lw=3)
figure.colorbar(image, ax=axes, label="weight", extend="max", ticks=range(5))
layers, heads, _ = coverages["full"].weights.shape
caption = f"{len(ids)} tokens of a novel; mean weight over {layers} layers of {heads} KV heads"
runtime.picture(figure, "The cached tokens of each policy", caption, colours=256)

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
shown = {name: coverages[name] for name in ("streaming", "stratified", "balance", "snapkv")}
cached_tokens.highlight(llm, ids[: len(ids) // 2], shown)

# %% [markdown]
# Of this half, `streaming` caches only the first four tokens.
#
# ## Can the model still see the answer?
#
# The passage names a stick and quotes the engraving on it. The next cell shows in which fraction of
# the heads these words are still cached after the whole passage.

# %%
PHRASES = {"the stick": "Penang", "the engraving": "To James Mortimer"}
places = {name: cached_tokens.find_tokens(llm, ids, phrase) for name, phrase in PHRASES.items()}
places = {name: place for name, place in places.items() if place is not None}
places |= {"the last ten tokens": slice(len(ids) - 10, len(ids))}
print(f"{'':20}" + "".join(f"{name:>22}" for name in places))
for name, coverage in coverages.items():
    print(f"{name:20}" + "".join(f"{coverage.share(place):22.0%}" for place in places.values()))

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
# ## What halving does
#
# To halve a set of tokens, give each token a random sign and keep the tokens with a plus sign. With
# fair coins, this may keep 13 of 20 tokens of one kind and 7 of 20 of another. The *self-balancing
# walk* of BalanceKV uses the signs given so far: a token that resembles many kept tokens is more
# likely to be dropped. Each token is still kept with probability one half, and kept tokens count
# twice. So the estimates of the sums in attention are unbiased.
#
# Two tokens resemble each other if they have similar keys and values. The walk represents each token
# by a vector. The inner products of these vectors are `exp(<k, k'>) <v, v'>`. The walk keeps the
# signed sum of the vectors short. The longer this sum, the larger the error of attention to the kept
# tokens can be. The plots below show the sum for keys in a plane, with equal values:

# %%
from jaxkv.colab import balance

halves = balance.halve_points(draws=runtime.size(400, 100), seed=3)
colours = {"random": palette.COLOURS["uniform"], "balanced": palette.COLOURS["balance"]}
typical = {name: np.argsort(x[:, -1])[len(x) // 2] for name, x in halves.norms.items()}

# %%
figure, (*planes, right) = pictures.begin(7.0, 3.6, columns=3)
for axes, (name, colour) in zip(planes, colours.items(), strict=True):
    is_kept, norms = halves.is_kept[name][typical[name]], halves.norms[name]
    fill = np.where(is_kept, colour, "white")
    axes.scatter(*halves.points.T, s=16, c=fill, edgecolors=colour, linewidths=0.7)
    for number, at in enumerate(0.55 * balance.CENTRES):
        kept = is_kept[halves.clusters == number]
        axes.annotate(f"{kept.sum()}:{(~kept).sum()}", at, ha="center", va="center", fontsize=8)
    axes.set(title=name, xlabel="key, 1st coordinate", ylabel="key, 2nd coordinate", aspect="equal")
    at, middle = range(1, norms.shape[1] + 1), np.median(norms, axis=0)
    right.fill_between(at, *np.quantile(norms, [0.1, 0.9], axis=0), color=colour, alpha=0.25)
    right.plot(at, middle, color=colour)
right.set(xlabel="keys with a sign", ylabel="norm of the signed sum", ylim=(0, None))
caption = "96 keys in five clusters; full dots are kept. Right: median and 80 % of the draws"
runtime.picture(figure, "Halves by chance and by balance (kept : dropped)", caption, colours=32)

# %% [markdown]
# **What to see.** The two left panels compare coins with the walk. The numbers count kept and
# dropped keys per cluster. On the right, the signed sum of the coins grows as the square root of the
# number of tokens; that of the walk hardly grows. So the advantage of balancing grows with the
# number of tokens that are compressed together.
#
# ## Which keys favour balance?
#
# Synthetic keys make the cause explicit. Each prompt has 1,056 tokens. The last 32 stay, and a
# quarter of the others. The relative error is the distance between the attention outputs with the
# compressed and with the full prompt, divided by the norm of the latter. The prompts:
#
# - **neighbours alike**: keys and values change slowly from token to token.
# - **kinds, mixed**: each token belongs to one of 32 kinds, in random order. Tokens of one kind
#   have similar keys and similar values.
# - **nothing alike**: all keys and values are independent.
# - **a few heavy keys**: all keys and values are independent, and all queries attend mostly to 8 of
#   the keys.
#
# The methods: `balance` signs pairs of neighbours, `stratified` draws one of each pair of neighbours,
# `uniform` draws from all tokens, and `snapkv` selects by the attention of the prompt's last queries.

# %%
QUARTER = "rounds=2,sinks=0,window=32"
METHODS = {
    "balance": f"balance:mode=pairs,{QUARTER}",
    "stratified": f"balance:mode=coin,{QUARTER}",
    "uniform": f"uniform:{QUARTER}",
    "snapkv": f"snapkv:capacity={32 + 1024 // 4},window=32",
}
SEEDS = range(runtime.size(10, 2))
errors = {name: [balance.errors(METHODS, name, seed) for seed in SEEDS] for name in balance.PROMPTS}

# %%
figure, axes = pictures.begin(7.0, 3.8)
for number, (method, mark) in enumerate(zip(METHODS, "os^v", strict=True)):
    by_prompt = np.array([[by[method] for by in seeds] for seeds in errors.values()])
    middle, at = np.median(by_prompt, axis=1), np.arange(len(errors)) + 0.15 * (number - 1.5)
    bars = np.stack([middle - by_prompt.min(axis=1), by_prompt.max(axis=1) - middle])
    axes.errorbar(at, middle, bars, fmt=mark, label=method, color=palette.COLOURS[method])
axes.axhline(1, color=pictures.INK, lw=0.8, ls="dotted")
axes.set(yscale="log", ylabel="relative error of attention")
axes.set_xticks(range(len(errors)), errors)
pictures.legend(figure, 4)
caption = f"{len(SEEDS)} prompts each; median, minimum and maximum; dotted: an output of zero"
runtime.picture(figure, "The error of attention after a quarter is kept", caption)

# %% [markdown]
# **What to see.**
#
# - **neighbours alike**: one token of every four neighbours is enough. Stratified sampling has
#   about the same error as balance, and does not use the keys.
# - **kinds, mixed**: similar tokens are spread over the prompt. Only balance finds them.
# - **nothing alike**: no tokens are similar, so balancing has no effect. Every method has a large
#   error, and that of balance is about that of a random sample.
# - **a few heavy keys**: a quarter of the prompt, balanced or not, lacks three of every four heavy
#   keys. The tokens must be selected by attention score. This selection works as long as later
#   queries attend to the same keys as the last queries of the prompt.
#
# ## The loss after a prompt
#
# The next cell scores the tokens after prompts from the novel, with a quarter of the tokens between
# their ends cached. The column `over first` has the loss minus that of `full`, with two standard errors.

# %%
from jaxkv.models.tools import compare

count, length, after = runtime.size((8, 1_024, 128), (2, 512, 64))
prompt = length - after
text = compare.cut(llm, runtime.passage(llm, count * length), prompt, after - 1, count)
ENDS, slots = "rounds=2,sinks=64,window=64", 128 + (prompt - 128) // 4
names = ["full", f"balance:{ENDS}", f"uniform:{ENDS}", f"uniform:weighted=false,{ENDS}"]
names += [f"snapkv:capacity={slots},window=32", f"streaming:sinks=4,window={slots - 4}"]
names = names[: runtime.size(6, 3)]
scores = compare.compare(llm, text, names, chunk=None, seed=0, watch=runtime.no_progress)
over = compare.over_first(scores, after)
results = [compare.result(llm, x, scores[x], after, over=over[x]) for x in names]
runtime.TextBox(compare.table(results))

# %% [markdown]
# **What to see.** Every method raises the loss. Balance does not differ from the weighted random
# sample, nor from `snapkv`, by two standard errors. The sample without weights, in which a kept token
# does not count for those that it represents, has a higher loss.
#
# ## Which method to use
#
# - **streaming**: for endless text; try it first.
# - **balance**: to keep a half or a quarter of a prompt if the question is not known in advance,
#   many tokens share the attention, and tokens come in kinds.
# - **uniform**, or **stratified** where neighbours are similar: for the same case, if compression
#   must be fast.
# - **snapkv**: for a prompt that ends in its question, or if only few tokens matter and the end of
#   the prompt attends to them.
# - **full**: for questions about single facts anywhere in the prompt. A sample, balanced or not,
#   lacks most of these facts.
#
# A lower attention error does not imply better answers. The records of this repository, with layers of
# a real model, answers, times and their commands, are in
# [docs/results/balancekv.md](https://github.com/jaxkv/jaxkv/blob/main/docs/results/balancekv.md).
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
import jaxkv

WINDOWS, SAMPLES = ("window", "streaming"), ("reservoir", "stratified", "balance-stream")
COMPRESSED, SCORED = ("uniform", "balance"), ("h2o", "snapkv", "pyramidkv")
WITHOUT_WINDOW = ("expected-attention", "keydiff")
is_cached = {name: coverage.weights > 0 for name, coverage in coverages.items()}
mean = {name: x.counts.mean() / BUDGET for name, x in coverages.items() if name != "full"}
between = {name: mask[:, :, 4 : TOKENS - 61] for name, mask in is_cached.items()}
fours = between["stratified"].reshape(*between["stratified"].shape[:2], -1, 4).sum(axis=3)
older, newer = np.split(between["balance-stream"], 2, axis=2)
anywhere = {name: np.flatnonzero(is_cached[name].any(axis=(0, 1))).tolist() for name in WINDOWS}
newest = list(range(TOKENS - BUDGET, TOKENS))
lookback = {n: jaxkv.policy(POLICIES[n]).max_lookback for n in (*WINDOWS, *SAMPLES, "h2o")}
sizes = [coverages[name].state_bytes for name in mean]
shares = {name: [x.share(place) for place in places.values()] for name, x in coverages.items()}
chance, balanced = (np.median(norms, axis=0) for norms in halves.norms.values())
near, kinds, apart, heavy = (
    {method: np.median([by[method] for by in seeds]) for method in METHODS}
    for seeds in errors.values()
)
rises = [(over[name]["mean"], over[name]["two_errors"]) for name in names[1:]]
gaps = compare.over_first({name: scores[name] for name in names[1:]}, after)

always = {
    "full caches every token": bool((coverages["full"].weights == 1).all()),
    "the other policies meet their budget within 2 %": all(
        abs(mean[name] - 1) < 0.02 for name in mean if name != "pyramidkv"
    ),
    "of the streaming policies, only h2o looks back further than its budget": all(
        (furthest <= BUDGET) != (name == "h2o") for name, furthest in lookback.items()
    ),
    "window caches only the newest tokens": anywhere["window"] == newest,
    "streaming also caches the first four": anywhere["streaming"] == [0, 1, 2, 3, *newest[4:]],
    "policies with a sample cache all of the newest tokens": all(
        is_cached[name][:, :, 1 - 61 :].all() for name in SAMPLES
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
        (x[-1] == 1) != (name in WITHOUT_WINDOW) for name, x in shares.items()
    ),
    "in the plane, coins leave a longer sum than the walk": 1.5 * balanced[-1] < chance[-1],
    "the sum of the coins keeps growing, that of the walk hardly grows": (
        chance[-1] > 1.4 * chance[len(chance) // 4]
        and balanced[-1] < 1.4 * balanced[len(balanced) // 4]
    ),
    "neighbours alike: balance and stratified are about equal, and better than uniform": (
        0.5 < near["balance"] / near["stratified"] < 2
        and max(near["balance"], near["stratified"]) < 0.6 * near["uniform"]
    ),
    "kinds, mixed: balance has the lowest error": (
        kinds["balance"] < 0.7 * min(kinds[name] for name in kinds if name != "balance")
    ),
    "nothing alike: every error is large, and that of balance is that of a sample": (
        min(apart.values()) > 0.3
        and 0.8 < apart["balance"] / min(apart["stratified"], apart["uniform"]) < 1.25
    ),
    "a few heavy keys: selection by attention score is far better": (
        heavy["snapkv"] < 0.2 * min(heavy[name] for name in heavy if name != "snapkv")
    ),
}
default_only = {
    "pyramidkv meets its budget on average, within 5 %": abs(mean["pyramidkv"] - 1) < 0.05,
    "it gives more slots to early layers": all(
        np.diff(coverages["pyramidkv"].counts.mean(axis=1)) < 0
    ),
    "heads differ in their samples and selections": all(
        (between[name] != between[name][:, :1]).any() for name in ("reservoir", *SCORED)
    ),
    "all but full take the same memory, within a tenth": max(sizes) < 1.1 * min(sizes),
    "window and streaming have evicted stick and engraving": len(places) == 3
    and not any(sum(shares[name][:2]) for name in WINDOWS),
    "with a sample, some heads cache parts of them": all(
        0 < share < 1 for name in (*SAMPLES, *COMPRESSED) for share in shares[name][:2]
    ),
}
if not runtime.SMOKE:
    default_only |= {
        "every method raises the loss": all(rise > error for rise, error in rises),
        "balance does not differ from the weighted sample, nor from snapkv": all(
            abs(gaps[names[n]]["mean"]) < gaps[names[n]]["two_errors"] for n in (2, 4)
        ),
        "a sample without weights has a higher loss": (
            gaps[names[3]]["mean"] > gaps[names[3]]["two_errors"]
        ),
    }
runtime.verify("" if llm.name.startswith("SmolLM2") else "another model", always, default_only)
