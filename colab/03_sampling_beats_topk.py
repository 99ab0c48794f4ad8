# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/03_sampling_beats_topk.ipynb)
#
# # When sampling beats top-k
#
# A query need not attend to every key. Should it attend to the keys with the largest attention
# weights, or to a random sample drawn by weight? [MagicPIG](https://arxiv.org/abs/2410.16179) argues
# for a sample if attention has a long tail. This notebook shows where a sample has the lower
# error and how hash tables find such a sample. The third cell lists the devices on which this
# notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[serve,train] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("03_sampling_beats_topk")

# %% [markdown]
# An empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package
# index is reached. Any Llama-family model can replace it: a Hub id, a folder or a GGUF file. The
# statements about layers, heads and losses apply to SmolLM2.

# %%
import numpy as np

from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL or runtime.default_model())
count, length = runtime.size((8, 1_024), (2, 256))
ids = runtime.passage(llm, count * length)
texts = np.array(ids, np.int32).reshape(count, length)
print(f"{llm.name}: {llm.config.layers} layers; {count} stretches of {length:,} tokens")

# %% [markdown]
# The model reads stretches of a novel, and the queries, keys and values of four layers are recorded:
# the first, those a third and two thirds of the way up, and the last. The last 64 tokens of each
# stretch are the queries. They attend to all tokens before them and to themselves.

# %%
from jaxkv.colab import attention

last = llm.config.layers - 1
layers = attention.record(llm, texts, sorted({0, round(last / 3), round(2 * last / 3), last}))
weights = {n: attention.weights(llm.spec, heads) for n, heads in layers.items()}
sink = {n: of_layer[..., 0].mean() for n, of_layer in weights.items()}
print(
    *(
        f"layer {n}: {share:.1%} of the attention is on the first token"
        for n, share in sink.items()
    ),
    sep="\n",
)

# %% [markdown]
# ## The long tail
#
# Sort the keys of a query by attention weight and add the weights, heaviest first. Each curve
# below is one head. If a curve rises steeply, a few keys have all the weight. If it is a straight
# line, all keys have the same weight. Between them is the *long tail*: few keys with much weight,
# and many with little weight each but much in total.

# %%
from jaxkv.models.tools import palette, pictures

tails = {n: np.cumsum(-np.sort(-w, axis=-1), axis=-1).mean(axis=(0, 2)) for n, w in weights.items()}
figure, axes = pictures.begin(6.0, 3.8)
for (n, curves), colour in zip(tails.items(), palette.OTHERS, strict=False):
    lines = axes.plot(100 * np.arange(1, length + 1) / length, 100 * curves.T, color=colour, lw=0.9)
    lines[0].set_label(f"layer {n}")
axes.axvline(20, color=pictures.INK, lw=0.8, ls="--")
axes.plot([0, 100], [0, 100], color=pictures.INK, lw=0.8, ls=":")
axes.set(xlabel="heaviest keys (%)", ylabel="their weight (%)", xlim=(0, 100), ylim=(0, 100))
pictures.legend(figure, len(tails))
caption = "one line per query head; dashed: a fifth of the keys; dotted: keys of equal weight"
runtime.picture(figure, "Weight of the heaviest keys", caption, colours=32)

# %% [markdown]
# ## Top-k or a sample?
#
# The next cell defines three ways to attend to a part of the keys:
#
# - **topk** takes the keys with the largest weights and ignores the others.
# - **oracle** draws keys by weight and averages their values. The estimate is unbiased, but a draw
#   by weight needs the weights of all keys. MagicPIG approximates this sample.
# - **uniform** draws keys uniformly and weights each by its attention.

# %%
METHODS, rng = ("topk", "oracle", "uniform"), np.random.default_rng(0)


def choose(method, weights, keys):
    """The weights of the keys that a method attends to; 0 for all others."""
    if method == "oracle":
        return rng.multinomial(keys, weights) / keys
    score = weights if method == "topk" else rng.random(weights.shape) * (weights > 0)
    limit = -np.partition(-score, keys - 1, axis=-1)[..., keys - 1 : keys]
    return np.where(score >= limit, weights, 0)


# %% [markdown]
# The relative error is the distance from the exact attention output, divided by the norm of that
# output. Here each query attends to one key in twenty.


# %%
def output(weights, values):
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def error(estimate, exact):
    """By query head, the relative error over all queries of a stretch; mean over stretches."""
    distance, size = (np.linalg.norm(x, axis=(2, 3)) for x in (estimate - exact, exact))
    return (distance / size).mean(axis=0)


SHARE = 0.05
exact = {n: output(weights[n], layers[n].v) for n in layers}
errors = {
    n: {m: error(output(choose(m, w, round(SHARE * length)), layers[n].v), exact[n]) for m in METHODS}
    for n, w in weights.items()
}  # fmt: skip

# %%
fifth = {n: curves[:, length // 5] for n, curves in tails.items()}
print("layer   weight of the heaviest fifth   heads with the lowest error for", *METHODS)
for n, by_method in errors.items():
    best = np.argmin([by_method[method] for method in METHODS], axis=0)
    wins = np.bincount(best, minlength=len(METHODS))
    print(f"{n:5}{fifth[n].min():18.0%} to {fifth[n].max():4.0%}{wins[0]:40}{wins[1]:7}{wins[2]:8}")

# %% [markdown]
# **What to see.** In the first layer, attention is spread over many keys, and a sample by weight has
# the lowest error in most heads. In the other layers, top-k has the lowest error in most heads. A
# uniform sample has the lowest error in no head.
#
# ## Why sampling wins or loses
#
# Synthetic keys make the cause explicit. Their logits are normally distributed: the larger the
# standard deviation, the shorter the tail. The values correlate with the logits, so the values of
# heavy keys differ from those of light keys.


# %%
def synthetic(sigma, keys, correlation, samples=16):
    """Attention weights and values of one query per sample."""
    scores, mean, along = (rng.normal(size=(samples, 1, size, 1)) for size in (keys, 64, 64))
    noise = (1 - correlation**2) ** 0.5 * rng.normal(size=(samples, 1, keys, 64))
    values = mean.swapaxes(2, 3) + correlation * scores * along.swapaxes(2, 3) + noise
    exponentials = np.exp(sigma * scores.swapaxes(2, 3))
    return exponentials / exponentials.sum(axis=-1, keepdims=True), values


SIGMAS = runtime.size((0.25, 0.5, 1.0, 1.5, 2.0, 3.0), (0.25, 3.0))
FEW, MANY = runtime.size((512, 4_096), (256, 2_048))
CASES = {f"{MANY:,} keys": (MANY, 0.45), f"{FEW:,} keys": (FEW, 0.45),
         f"{FEW:,}, independent values": (FEW, 0.0)}  # fmt: skip

# %%
curves = {case: {"fifth": []} | {method: [] for method in METHODS} for case in CASES}
for case, (keys, correlation) in CASES.items():
    for sigma in SIGMAS:
        of_keys, values = synthetic(sigma, keys, correlation)
        heaviest = np.sort(of_keys, axis=-1)[..., -(keys // 5) :]
        curves[case]["fifth"].append(heaviest.sum(axis=-1).mean())
        for method in METHODS:
            estimate = output(choose(method, of_keys, round(SHARE * keys)), values)
            curves[case][method].append(error(estimate, output(of_keys, values))[0])
curves = {case: {name: np.array(line) for name, line in of.items()} for case, of in curves.items()}

# %% [markdown]
# In the left panel below, each head of the model is one dot per method. In the right panel, each
# curve goes from a flat tail to a short one. Below the line at 1, a sample has a lower error than
# top-k.

# %% tags=["picture"]
figure, (left, right) = pictures.begin(7.0, 4.2, columns=2)
for method in ("oracle", "uniform"):
    look = {"color": palette.COLOURS[method], "label": method}
    ratios = [errors[n][method] / errors[n]["topk"] for n in errors]
    left.plot(100 * np.concatenate([*fifth.values()]), np.concatenate(ratios), "o", ms=3.5, **look)
for (case, curve), line in zip(curves.items(), palette.LINES, strict=False):
    for method in ("oracle", "uniform"):
        ratio = curve[method] / curve["topk"]
        right.plot(100 * curve["fifth"], ratio, ls=line, color=palette.COLOURS[method])
    right.plot([], [], ls=line, color=pictures.INK, label=case)
for axes, title in ((left, "heads of the model"), (right, "synthetic keys")):
    axes.axhline(1, color=palette.COLOURS["topk"], lw=1.2)
    axes.set(title=title, xlabel="weight of the heaviest fifth (%)", yscale="log")
left.set(ylabel="error over that of top-k")
pictures.legend(figure, 3)
caption = f"{SHARE:.0%} of the keys are read; dotted: values that do not follow the weight"
runtime.picture(figure, "Sampling over top-k, by the length of the tail", caption)

# %% [markdown]
# **What to see.** Sampling by weight has the lower error under three conditions.
#
# - **The tail is long.** At an equal number of keys, the error of top-k falls as the tail gets
#   shorter. With few keys and a short tail, top-k has the lower error.
# - **Heavy keys have other values than light keys.** If values do not correlate with the weight
#   (dotted), the heaviest keys represent the others well. The error of top-k is then about that of a
#   sample or lower.
# - **There are many keys.** One in twenty keys is then a large number of draws. The error of a
#   random sample falls with the number of draws; that of top-k does not.
#
# The third condition may explain the difference from the paper, whose models read at least 16 thousand
# tokens; here the model reads a thousand. So neither method is best everywhere.
# [vAttention](https://arxiv.org/abs/2510.05688) combines them: it attends to the heaviest keys and to
# a sample of the others (policy `vattention`).
#
# ## Reading the sink apart
#
# In the upper layers, the first token is a *sink*: it gets much of the weight, but its value has little
# information. The next cell compares two ways to treat it in the layer with the largest sink: it is
# selected like any other key, or every query reads it, besides the selected keys.

# %%
layer = max(sink, key=sink.get)
first, rest, values = weights[layer][..., :1], weights[layer][..., 1:], layers[layer].v
apart = {}
for method in METHODS:
    chosen = choose(method, rest / (1 - first), round(SHARE * length))
    estimate = first * values[:, :, :1] + (1 - first) * output(chosen, values[:, :, 1:])
    apart[method] = error(estimate, exact[layer]).mean()
    print(
        f"{method:8} error {errors[layer][method].mean():.3f}, with the sink apart {apart[method]:.3f}"
    )

# %% [markdown]
# **What to see.** `topk` always selects the sink, so it gains little. In a sample by weight, many draws
# are the sink. If the sink is always read, all draws are other keys, and the error falls. A uniform
# sample usually lacks the sink. The policies of this library attend to the first tokens exactly.
#
# ## How hash tables draw a sample
#
# A sample by weight seems to need all weights. MagicPIG hashes every key L times, each time by the
# signs of K random projections. A query attends to the keys that share its code in at least two of
# the L tables. The probability of this event follows from the angle between query and key. Each
# selected key is weighted by one over this probability, so the estimates of the sums in attention are
# unbiased.


# %%
def found(cosine, bits, tables):
    """The probability that a key shares a query's code in at least two tables."""
    same = (1 - np.arccos(cosine) / np.pi) ** bits
    return 1 - (1 - same) ** tables - tables * same * (1 - same) ** (tables - 1)


def cosines(heads, centred):
    """Cosines of the last queries and the keys between the sink and these queries."""
    keys = heads.k[:, :, 1 : -attention.QUERIES]
    keys = keys - centred * keys.mean(axis=2, keepdims=True)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (heads.q, keys))
    return np.clip(q @ k.swapaxes(2, 3), -1, 1)


# %%
BITS, TABLES = 8, 95
figure, axes = pictures.begin(6.6, 3.8)
edges, at = np.linspace(-1, 1, 81), np.linspace(-0.999, 0.999, 200)
for centred, look in ((False, {"color": pictures.INK}), (True, {"fill": True, "alpha": 0.3})):
    keys = np.histogram(cosines(layers[layer], centred), edges)[0]
    axes.stairs(keys / keys.max(), edges, label="centred keys" if centred else "keys", **look)
for bits, tables, line in ((10, 150, "dashed"), (BITS, TABLES, "solid")):
    label = f"found with K={bits}, L={tables}"
    axes.plot(at, found(at, bits, tables), ls=line, color=palette.COLOURS["magicpig"], label=label)
axes.set(xlabel="cosine of query and key", ylabel="probability; keys scaled to 1", ylim=(0, 1.02))
pictures.legend(figure, 2)
caption = f"layer {layer}; area: keys minus their mean, as they are hashed"
runtime.picture(figure, "Which keys hash tables find", caption, colours=32)

# %% [markdown]
# **What to see.** The plot shows the layer with the largest sink. Most keys are at more than 90 degrees
# from the query (outline), where the tables find almost none. If the mean key is subtracted before
# hashing, the keys lie around 90 degrees (area), and some of them are close enough to be found. The
# mean does not affect the softmax, because it adds the same amount to all logits of a query.
#
# With more bits K, fewer keys are found; with more tables L, more keys are found. The next cell
# computes the share of keys that 95 tables of 8 bits find in each layer. In a clone,
# `python -m jaxkv.evals.magicpig.tune_lsh --text book.txt` finds K and L for your model and text.

# %%
share_found = {n: found(cosines(heads, True), BITS, TABLES).mean() for n, heads in layers.items()}
print(*(f"layer {n}: {share:.1%} of the keys" for n, share in share_found.items()), sep="\n")

# %% [markdown]
# ## As policies
#
# A policy string names a method and its settings. Under each of these, queries after the prompt
# attend to the first 4 tokens, the newest 16 and about a tenth of the keys between. The prompt itself
# is read with full attention. The next cell scores the tokens after each prompt. The column `over
# first` has the loss minus that of `full`, with two standard errors.

# %%
from jaxkv.models.tools import compare

ENDS, DRAW = "sinks=4,window=16", "epsilon=0.99,delta=0.99,sides=one"  # draw no more than the share
POLICIES = {
    "full": "full",
    "uniform": f"vattention:top=0,base=0.1,{DRAW},{ENDS}",
    "topk": f"topk:share=0.1,{ENDS}",
    "oracle": f"oracle:share=0.1,{ENDS}",
    "vattention": f"vattention:top=0.05,base=0.0526,{DRAW},{ENDS}",
    "magicpig": f"magicpig:K={BITS},L={TABLES},{ENDS}",
}

# %%
after = length // 8
text = compare.cut(llm, ids, length - after, after - 1, count)
strings = list(POLICIES.values())[: runtime.size(6, 3)]
scores = compare.compare(llm, text, strings, chunk=None, seed=0, watch=runtime.no_progress)
over = compare.over_first(scores, after)
results = [compare.result(llm, x, scores[x], after, over=over[x]) for x in strings]
runtime.TextBox(compare.table(results))

# %% [markdown]
# **What to see.** The uniform sample (`vattention:top=0`) raises the loss most. With each of the other
# four policies, the rise is less than half of that.
#
# Of these four policies, only `magicpig` selects keys without reading every key, so only it can save
# time. On a CPU it is faster than full attention after tens of thousands of tokens
# ([measurements](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md)).
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
numbers = [*layers]
lowest = {n: np.argmin([errors[n][m] for m in METHODS], axis=0) for n in numbers}
later = np.concatenate([lowest[n] for n in numbers[1:]])
angles = [cosines(layers[layer], centred) for centred in (False, True)]
rise = {name: over[string]["mean"] for name, string in POLICIES.items() if string in over}
default_only = {
    "first layer: a sample by weight has the lowest error in most heads": (
        np.mean(lowest[0] == 1) > 0.7
    ),
    "later layers: top-k has the lowest error in most heads": np.mean(later == 0) > 0.5,
    "a uniform sample has the lowest error in no head": all((x != 2).all() for x in lowest.values()),
    "the last two layers have a sink, the others have none": [x > 0.2 for x in sink.values()]
    == [False, False, True, True] and max([*sink.values()][:2]) < 0.05,
    "top-k gains little if the sink is always read": (
        apart["topk"] > 0.9 * errors[layer]["topk"].mean()
    ),
    "a sample by weight gains": apart["oracle"] < 0.9 * errors[layer]["oracle"].mean(),
    "a uniform sample usually lacks the sink": (
        apart["uniform"] < 0.8 * errors[layer]["uniform"].mean()
    ),
    "most keys are at more than 90 degrees, centred ones are around 90": (
        np.mean(angles[0] < 0) > 0.9 and abs(angles[1].mean()) < 0.05
    ),
    "the tables find about a tenth of the keys": 0.05 < np.mean([*share_found.values()]) < 0.15,
    "a uniform sample raises the loss most": max(rise, key=rise.get) == "uniform",
    "each of the other policies, less than half of that": (
        max(rise[name] for name in rise if name != "uniform") < 0.5 * rise["uniform"]
    ),
} if not runtime.SMOKE else {}  # fmt: skip
large, small, independent = curves.values()
always = {
    "synthetic: a sample by weight beats top-k where the tail is flat": (
        large["topk"][0] > 2 * large["oracle"][0] and small["topk"][0] > 2 * small["oracle"][0]
    ),
    "synthetic: top-k improves as the tail gets shorter": all(
        x["oracle"][-1] / x["topk"][-1] > x["oracle"][0] / x["topk"][0] for x in (large, small)
    ),
    "synthetic: with few keys, top-k wins in the end": small["topk"][-1] < 0.8 * small["oracle"][-1],
    "synthetic: where values do not follow the weight, top-k is as good as a sample": (
        (independent["topk"] < 1.1 * independent["oracle"]).all()
    ),
    "synthetic: with more keys, a sample improves": (
        (large["oracle"] / large["topk"] < 0.7 * small["oracle"] / small["topk"]).all()
    ),
}  # fmt: skip
is_smollm2 = llm.name.startswith("SmolLM2")
runtime.verify("" if is_smollm2 else "another model", always, default_only)
