# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/04_sampling_beats_topk.ipynb)
#
# # When sampling beats top-k
#
# A query need not attend to every key. Should it attend to the keys with the largest attention
# weights, or to a random sample drawn by weight? [MagicPIG](https://arxiv.org/abs/2410.16179) argues
# for a sample if attention has a long tail. This notebook shows where a sample has the lower
# error and how hash tables find such a sample. The third cell lists run times by device.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("04_sampling_beats_topk")

# %% [markdown]
# Queries, keys and values come from a model that reads stretches of a novel. The default model is
# small. The field below takes the Hub id of another. The last 64 tokens of each stretch are the
# queries. They attend to all tokens before them.

# %%
from jaxkv import models
from jaxkv.colab import long_tail
from jaxkv.colab import long_tail_figures as figures
from jaxkv.evals.magicpig import heads

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
spec, count, length = llm.spec, runtime.size(8, 2), min(llm.config.context, 512)
ids = runtime.passage(llm, count * length)
layers = long_tail.pick_layers(heads.layers_of(llm, ids, count))
print(f"{llm.name}: {len(layers)} of {llm.config.layers} layers are measured")

# %% [markdown]
# ## The long tail
#
# Sort the keys of a query by attention weight and add the weights, heaviest first. Each curve
# below is one head. If a curve rises steeply, a few keys have all the weight. If it is a straight
# line, all keys have the same weight. Between them is the *long tail*: few keys with much weight,
# and many with little weight each but much in total.

# %%
tails = {n: long_tail.cumulative_weights(spec, layer) for n, layer in layers.items()}
figures.draw_tails(tails)

# %% [markdown]
# ## Top-k or a sample?
#
# The next cell compares three ways to attend to one key in twenty:
#
# - **topk** takes the keys with the largest weights and ignores the others.
# - **oracle** draws keys by weight and averages their values. The estimate is unbiased, but a draw
#   by weight needs the weights of all keys. MagicPIG approximates this sample.
# - **uniform** draws keys uniformly and weights each by its attention.
#
# The relative error is the distance from the exact attention output, divided by the norm of that
# output.

# %%
share, seeds = 0.05, runtime.size(3, 1)
by_head = long_tail.measure_heads(spec, layers, share, seeds)
runtime.TextBox(long_tail.heads_table(spec, layers, by_head))

# %% [markdown]
# **What to see.** In the default model, top-k has the lowest error in most heads, and in every head
# where a fifth of the keys has more than nine tenths of the weight. In the first layer, top-k has
# the highest error of the three. Attention is flat there, and top-k ignores all keys except the
# heaviest. A uniform sample has about the same error as a sample by weight.
#
# In a few heads of the later layers, sampling by weight has the lowest error. These heads have long
# tails: the tail has too much weight for top-k, and too little for a uniform sample. The plot below
# shows three heads by budget: the flattest, the one with the largest advantage of sampling by
# weight, and the most peaked.

# %%
budgets = runtime.size((0.01, 0.02, 0.05, 0.1, 0.2, 0.4), (0.02, 0.05))
of_head, reported = {}, long_tail.pick_heads(by_head)
for name, at in reported.items():
    n, head = by_head.layer[at], by_head.head[at]
    one = long_tail.single_head(spec, layers[n], head)
    of_head[f"{name}:\nlayer {n}, head {head}"] = long_tail.errors_by_budget(*one, budgets, seeds)
figures.draw_budgets(of_head, budgets)

# %% [markdown]
# ## Why sampling wins or loses
#
# Synthetic keys make the cause explicit. Their logits are normally distributed: the larger the
# standard deviation, the shorter the tail. The values correlate with the logits, so the values of
# heavy keys differ from those of light keys. In the right panel, each curve goes from a flat tail to
# a short one. In the left panel, each head of the model is one dot per method. Below the blue line,
# a sample has a lower error than top-k.

# %%
few, many, sigmas = runtime.size((512, 4_096, long_tail.SIGMAS), (256, 2_048, (0.25, 1.5, 3.0)))
synthetic = {
    f"{many:,} keys": long_tail.measure_synthetic(
        many, sigmas, share, 0.45, (*long_tail.KINDS, "magicpig")
    ),
    f"{few:,} keys": long_tail.measure_synthetic(few, sigmas, share, 0.45),
    f"{few:,}, independent values": long_tail.measure_synthetic(few, sigmas, share, 0.0),
}

# %% tags=["picture"]
caption = (
    f"{share:.0%} of the keys read. Dotted: values that do not follow the weight. Synthetic logits "
    f"have standard deviations of {', '.join(f'{each:g}' for each in sigmas)}."
)
figures.draw_error_ratio(by_head, synthetic, share, caption)

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
# The third condition explains the difference from the paper, whose models read at least 16 thousand
# tokens; this model reads hundreds. `magicpig` draws as many keys through hash tables, with a
# probability that depends on the weight only roughly. With many keys and a long tail, its error is
# far below that of top-k.
#
# So neither method is best everywhere. [vAttention](https://arxiv.org/abs/2510.05688) combines
# them: it attends to the heaviest keys and to a sample of the others (policy `vattention`).
#
# ## How hash tables draw a sample
#
# MagicPIG hashes every key L times, each time by the signs of K random projections. A query attends
# to the keys that share its code in at least two of the L tables. The probability of this event
# follows from the angle between query and key. Each selected key is weighted by one over this
# probability, so the estimates of the sums in attention are unbiased.

# %%
figures.draw_inclusion(spec, layers[0], long_tail.PAIRS[:3])

# %% [markdown]
# **What to see.** In the first layer of the default model, the angle between most keys and the query
# is nearer to 90 degrees than to 0. Few of them are found; keys with smaller angles are found more
# often. The mean key is subtracted before hashing. Here this moves the keys slightly towards the
# query.
#
# ## The sink, and centring
#
# Two properties of the paper's models hinder sampling. First, all keys lie in a cone and queries
# point away from it, so no key would be found. Second, the key of the first token, the *sink*, has
# the direction of the queries. It gets most of the weight, but its value has little information. The default model has no sink, as the table above shows. So the next cell uses
# synthetic keys: a cone opposite to the query, and a sink with half of the weight.

# %%
with_sink = long_tail.measure_with_sink(many, share)
runtime.TextBox(long_tail.sink_table(with_sink))

# %% [markdown]
# **What to see.**
#
# - In a sample by weight, half of the draws are the sink. If the query always attends to the sink
#   besides the sample, all draws are other keys.
# - A uniform sample usually lacks the sink, which has half of the weight.
# - Hash tables find the sink, because its direction is close to that of the query. In any case, the
#   policy `magicpig` attends to the first tokens exactly.
# - Without centring, the tables find almost no keys. If the mean is subtracted, the hash depends on
#   the differences between keys. The mean does not affect the softmax, because it adds the same
#   amount to all logits of a query.
#
# ## Choosing K and L
#
# With more bits K, fewer keys are found; with more tables L, more keys are found. Each hash table
# takes two bytes per key, or four if there are more than 65,535 keys. The next cell shows averages
# over the first layer and one layer in the middle.

# %%
pairs = runtime.size(long_tail.PAIRS, long_tail.PAIRS[2:])
two = {n: layers[n] for n in (0, list(layers)[(len(layers) - 1) // 2])}
read = long_tail.measure_tables(spec, two, pairs, runtime.size(2, 1))
runtime.TextBox(long_tail.lsh_table(read))

# %% [markdown]
# Choose the smallest L whose error is acceptable. For your own model and text,
# `python -m jaxkv.evals.magicpig.tune_lsh --text book.txt` finds K and L.
#
# ## As policies
#
# The prompt is three quarters of a stretch; the rest of the stretch is scored. Under every policy,
# queries attend to the first 4 tokens, the newest 16 and about a tenth of the keys between; under
# `ends alone`, to none of these keys.

# %%
policies = long_tail.policies_at_share(0.1, (8, 75))
part = long_tail.measure_shares(spec, layers, policies)
scored = dict(list(policies.items())[: runtime.size(len(policies), 3)])
after_prompt = long_tail.measure_losses(llm, ids, count, scored)
runtime.TextBox(long_tail.loss_table(after_prompt, part))

# %% [markdown]
# **What to see.** Without the keys between the ends, the loss of the default model rises. A uniform
# sample of these keys avoids a part of the rise. With each of the other four policies, the rise is
# less than half of that with the uniform sample. `oracle` draws some keys several times, so it
# attends to fewer keys.
#
# Of these four policies, only `magicpig` selects keys without reading every key, so only it can save
# time. On a CPU it is faster than full attention after tens of thousands of tokens
# ([measurements](https://github.com/jaxkv/jaxkv/blob/main/evals/results/sparse.png)).
#
# The last cell checks these results.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
import numpy as np

oracle, top, uniform = (by_head.error[kind] for kind in ("oracle", "topk", "uniform"))
first, peaked, lead = by_head.layer == 0, by_head.fifth > 0.9, long_tail.oracle_over_best(by_head)
flattest, between, peak = (
    {k: [x.error for x in v] for k, v in of.items()} for of in of_head.values()
)
centred = {pair: read[*pair, True].share / read[*pair, False].share for pair in pairs}
cosines = [long_tail.cosines(spec, layers[0], center) for center in (True, False)]
lost = {name: over["mean"] for name, over in after_prompt.items()}
ours = {
    "top-k has the lowest error in most heads": np.mean((top < oracle) & (top < uniform)) > 0.5,
    "first layer: top-k has the highest error in every head": (
        (top > 1.3 * np.maximum(oracle, uniform))[first].all()
    ),
    "first layer: a uniform sample is about as good as one by weight": (
        abs((oracle / uniform)[first].mean() - 1) < 0.15
    ),
    "later layers: a sample by weight has the lowest error in a few heads": (
        0 < (lead[~first] < 0.95).sum() < len(lead) / 4
    ),
    "where a fifth of the keys has more than 90 % of the weight, top-k has the lowest error": (
        peaked.any() and (top < np.minimum(oracle, uniform))[peaked].all()
    ),
    "in the flattest head, top-k has the highest error at every budget": (
        np.greater(flattest["topk"], np.maximum(flattest["oracle"], flattest["uniform"])).all()
    ),
    "in the second head, a sample by weight has the lowest error at a twentieth": (
        1.05 * between["oracle"][budgets.index(share)]
        < min(between[kind][budgets.index(share)] for kind in ("topk", "uniform"))
    ),
    "in the most peaked head, top-k has the lowest error at every budget": (
        np.less(peak["topk"], np.minimum(peak["oracle"], peak["uniform"])).all()
    ),
    "centring moves keys of the first layer towards the query": cosines[0].mean()
    > cosines[1].mean() + 0.01,
    "most of those keys are closer to a right angle": np.mean(np.abs(cosines[0]) < 0.5) > 0.8,
    "there is no sink": max(long_tail.sink_weight(spec, layer) for layer in layers.values()) < 0.05,
    "tables find more keys when centred": min(centred.values()) > 1.2,
    "a uniform sample loses less than the ends alone": lost["uniform"] < 0.8 * lost["ends alone"],
    "each of the other policies loses less than half of that": (
        max(lost[name] for name in lost.keys() - {"ends alone", "uniform"}) < 0.5 * lost["uniform"]
    ),
    "about a tenth of the keys is read": (
        all(0.08 < part[name] < 0.12 for name in ("uniform", "magicpig", "topk", "vattention"))
    ),
}
large, small, loose = (one.error for one in synthetic.values())
long = next(iter(synthetic.values())).fifth < 0.9
apart, among = with_sink["always read"], with_sink["selected"]
always = {
    "synthetic: a sample by weight beats top-k where the tail is flat": (
        large["topk"][0] > 2 * large["oracle"][0] and small["topk"][0] > 2 * small["oracle"][0]
    ),
    "synthetic: top-k improves as the tail gets shorter": (
        all((np.diff(of["oracle"] / of["topk"]) > 0).all() for of in (large, small))
    ),
    "synthetic: with few keys, top-k wins in the end": small["topk"][-1]
    < 0.8 * small["oracle"][-1],
    "synthetic: where values do not follow the weight, top-k is as good as a sample": (
        (loose["topk"] < 1.1 * loose["oracle"]).all()
    ),
    "synthetic: with more keys, a sample improves": (
        (large["oracle"] / large["topk"] < 0.7 * small["oracle"] / small["topk"]).all()
    ),
    "synthetic: with many keys and a long tail, magicpig is far better than top-k": (
        (large["magicpig"] < 0.5 * large["topk"])[long].all()
    ),
    "a uniform sample misses the sink": among["uniform"].error > 3 * apart["uniform"].error,
    "a sample by weight improves if the sink is always read": (
        apart["oracle"].error < 0.8 * among["oracle"].error
    ),
    "magicpig finds the sink without help": (
        0.8 < apart["magicpig"].error / among["magicpig"].error < 1.25
    ),
    "without centring, the tables find almost nothing": (
        apart[long_tail.UNCENTRED].share < 0.005
        and apart[long_tail.UNCENTRED].error > 3 * apart["magicpig"].error
    ),
    "more tables of fewer bits read more": (
        read[*pairs[0], True].share < read[*pairs[-1], True].share
    ),
    "a sample by weight draws some keys twice": part["oracle"] < part["topk"],
}
runtime.verify(MODEL, always=always, ours=ours)
