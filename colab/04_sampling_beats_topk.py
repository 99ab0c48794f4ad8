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
# An empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package
# index is reached. Any Llama-family model can replace it: a Hub id, a folder or a GGUF file. The
# statements about layers, heads and losses apply to SmolLM2.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL or runtime.default_model())
spec, (count, length) = llm.spec, runtime.size((8, 1_024), (2, 256))
ids = runtime.passage(llm, count * length)
print(f"{llm.name}: {llm.config.layers} layers; {count} stretches of {length:,} tokens")

# %% [markdown]
# The model reads stretches of a novel, and the queries, keys and values of four layers are recorded:
# the first, those a third and two thirds of the way up, and the last. The last 64 tokens of each
# stretch are the queries. They attend to all tokens before them.

# %%
from jaxkv.colab import captured, long_tail
from jaxkv.colab import long_tail_figures as figures

layers = captured.some_layers(llm, ids, count, parts=runtime.size(3, 1))
weight = {n: captured.sink_weight(spec, layer) for n, layer in layers.items()}
sink_layer = max(weight, key=weight.get)
print(f"attention on the first token: {weight[sink_layer]:.0%} in layer {sink_layer}")

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
# **What to see.** In the first layer, attention is spread over many keys, and a sample by weight has
# the lowest error in every head. In the other layers, top-k has the lowest error in most heads, and in
# every head where a fifth of the keys has more than 95 % of the weight. A uniform sample has the lowest
# error in no head. In the last two of these layers, the first token is a *sink*: it receives more than
# a fifth of the weight. A later section shows what follows from this.
#
# The plot below shows three heads by budget: the flattest, the one after the first layer in which
# sampling by weight gains most, and the most peaked.

# %%
budgets = runtime.size((0.01, 0.02, 0.05, 0.1, 0.2, 0.4), (0.05,))
of_head, reported = {}, long_tail.pick_heads(by_head)
for name, at in reported.items():
    n, head = by_head.layer[at], by_head.head[at]
    cut = long_tail.single_head(spec, layers[n], head)
    of_head[f"{name}:\nlayer {n}, head {head}"] = long_tail.errors_by_budget(*cut, budgets, seeds)
figures.draw_budgets(of_head, budgets)

# %% [markdown]
# **What to see.** In the second head the errors cross: if many keys are read, top-k is better.
#
# ## Why sampling wins or loses
#
# Synthetic keys make the cause explicit. Their logits are normally distributed: the larger the
# standard deviation, the shorter the tail. The values correlate with the logits, so the values of
# heavy keys differ from those of light keys. In the right panel, each curve goes from a flat tail to
# a short one. In the left panel, each head of the model is one dot per method. Below the blue line,
# a sample has a lower error than top-k.

# %%
few_keys, many_keys, sigmas = runtime.size(
    (512, 4_096, long_tail.SIGMAS), (256, 2_048, (0.25, 3.0))
)
synthetic = {
    f"{many_keys:,} keys": long_tail.measure_synthetic(
        many_keys, sigmas, share, 0.45, (*long_tail.KINDS, "magicpig")
    ),
    f"{few_keys:,} keys": long_tail.measure_synthetic(few_keys, sigmas, share, 0.45),
    f"{few_keys:,}, independent values": long_tail.measure_synthetic(few_keys, sigmas, share, 0.0),
}

# %% tags=["picture"]
caption = (
    f"{share:.0%} of the keys read. Dotted: values that do not follow the weight. Synthetic logits "
    f"have standard deviations of {', '.join(f'{sigma:g}' for sigma in sigmas)}."
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
# The third condition may explain the difference from the paper, whose models read at least 16 thousand
# tokens; here the model reads a thousand. `magicpig` draws as many keys through hash tables, with a
# probability that depends on the weight only roughly. With many keys and a long tail, its error is
# far below that of top-k.
#
# So neither method is best everywhere. [vAttention](https://arxiv.org/abs/2510.05688) combines
# them: it attends to the heaviest keys and to a sample of the others (policy `vattention`).
#
# ## The sink, and the direction of keys
#
# Two properties of the paper's models hinder sampling. First, the key of the first token, the *sink*,
# gets much of the weight, but its value has little information. Second, all other keys lie in a cone
# and queries point away from it. The next cell measures both in each layer.

# %%
from jaxkv.evals.magicpig.geometry import geometry

shape = {n: geometry(spec, layer, f"layer {n}") for n, layer in layers.items()}
runtime.TextBox(long_tail.geometry_table(spec, layers, shape))

# %% [markdown]
# **What to see.** The model has both properties in the layers with a sink. The value of the first token
# is less than half as long as other values there. The queries point away from the mean key, in all of
# these layers but the first. The key of the sink points towards them. Where there is no sink, the first
# key has the direction of the mean key. The cosines are nearer to zero than those that the paper shows.
# In the paper, the key of the sink is opposite to the mean key; here only one of the two cosines is
# below zero.
#
# ## How hash tables draw a sample
#
# MagicPIG hashes every key L times, each time by the signs of K random projections. A query attends
# to the keys that share its code in at least two of the L tables. The probability of this event
# follows from the angle between query and key. Each selected key is weighted by one over this
# probability, so the estimates of the sums in attention are unbiased.

# %%
figures.draw_inclusion(spec, layers[sink_layer], long_tail.PAIRS[:3])

# %% [markdown]
# **What to see.** The plot shows the layer with the largest sink. Most keys are at more than 90 degrees
# from the query (outline), where the tables find almost none. If the mean key is subtracted before
# hashing, the keys lie around 90 degrees (area), and some of them are close enough to be found. The
# mean does not affect the softmax, because it adds the same amount to all logits of a query.
#
# ## Reading the sink apart
#
# The next cell compares two ways to treat the sink in this layer: it is selected like any other key,
# or every query reads it, besides the selected keys.

# %%
with_sink = long_tail.measure_with_sink(spec, layers[sink_layer], share, (8, 75), seeds)
runtime.TextBox(long_tail.sink_table(with_sink))

# %% [markdown]
# **What to see.**
#
# - `topk` always selects the sink, so it gains nothing.
# - In a sample by weight, many draws are the sink. If the sink is always read, all draws are other keys,
#   and the error falls.
# - A uniform sample usually lacks the sink.
# - Hash tables often miss the sink, because the angle between its key and the query is large. Its
#   weight is large, so the error is large too. The policy `magicpig` attends to the first tokens
#   exactly.
# - Without centring, the tables find few keys, and the error is much higher.
#
# With the sink apart, top-k still has the lowest error in this layer.
#
# ## Choosing K and L
#
# With more bits K, fewer keys are found; with more tables L, more keys are found. Each hash table
# takes two bytes per key, or four if there are more than 65,535 keys. The next cell shows averages
# over the two layers in the middle. The sink is always read.

# %%
pairs = runtime.size(long_tail.PAIRS, ((8, 75),))
two = dict(list(layers.items())[1:3])
read = long_tail.measure_tables(spec, two, pairs, 1)
runtime.TextBox(long_tail.lsh_table(read))

# %% [markdown]
# **What to see.** Centred keys are found more often. The more keys are read, the lower the error. Of a
# thousand keys, the paper's K and L (first row) find few, and the error is the highest of the four.
#
# `python -m jaxkv.evals.magicpig.tune_lsh --text book.txt` finds K and L for your model and text.
#
# ## As policies
#
# A policy string names a method and its settings. Under each of these, queries after the prompt
# attend to the first 4 tokens, the newest 16 and about a tenth of the keys between; under `ends
# alone`, to none of these keys.

# %%
import jaxkv
from jaxkv.evals.magicpig.matched_budgets import EndsOnly

ENDS, DRAW = "sinks=4,window=16", "epsilon=0.99,delta=0.99,sides=one"  # draw no more than the share
POLICIES = {
    "magicpig": f"magicpig:K=8,L=95,{ENDS}",
    "uniform": f"vattention:top=0,base=0.1,{DRAW},{ENDS}",
    "topk": f"topk:share=0.1,{ENDS}",
    "oracle": f"oracle:share=0.1,{ENDS}",
    "vattention": f"vattention:top=0.05,base=0.0526,{DRAW},{ENDS}",
}

# %% [markdown]
# A `Stream` reads the prompt with full attention, and `finish_prefill` builds the hash tables.
# Generation does the same (`models.generate(llm, text, policy=...)`). The next cells score the tokens
# after each prompt.


# %%
def loss_after(prompt, rest, policy, seed):
    stream = models.Stream(llm, policy, seed=seed)
    stream.prefill([prompt])
    stream.finish_prefill()
    losses = models.losses(llm, rest, chunk=len(rest), stream=stream)
    return float(next(losses).mean())


# %%
after, chosen = length // 8, {"ends alone": EndsOnly(4, 16)}
chosen |= {name: jaxkv.policy(text) for name, text in POLICIES.items()}
chosen = dict(list(chosen.items())[: runtime.size(6, 2)])
stretches = [ids[i * length : (i + 1) * length] for i in range(count)]
losses = {
    name: [loss_after(text[:-after], text[-after:], policy, i) for i, text in enumerate(stretches)]
    for name, policy in ({"full": "full"} | chosen).items()
}
part = long_tail.measure_shares(spec, layers, chosen)
runtime.TextBox(captured.loss_table(losses, {n: f"reads {x:.1%}" for n, x in part.items()}))

# %% [markdown]
# **What to see.** Without the keys between the ends, the loss rises most. A uniform sample of these keys
# avoids a part of the rise. With each of the other four policies, the rise is less than half of that with
# the uniform sample. `oracle` draws some keys several times, so it attends to fewer keys.
#
# Of these four policies, only `magicpig` selects keys without reading every key, so only it can save
# time. On a CPU it is faster than full attention after tens of thousands of tokens
# ([measurements](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md)).
#
# The last cell checks these results.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
import numpy as np

from jaxkv.evals.magicpig import heads, inclusion

oracle, top, uniform = (by_head.error[kind] for kind in ("oracle", "topk", "uniform"))
first, peaked, lead = by_head.layer == 0, by_head.fifth > 0.95, long_tail.oracle_over_best(by_head)
flattest, between, peak = (
    {k: np.array([x.error for x in v]) for k, v in by_kind.items()} for by_kind in of_head.values()
)
apart, among = with_sink["always read"], with_sink["selected"]
hashed, uncentred = apart[long_tail.CENTRED], apart[long_tail.UNCENTRED]
of_sink = heads.centred(spec, layers[sink_layer], 0, 1)[1][..., 0]
found_sink = np.exp(inclusion.log_u(np.asarray(of_sink), 8, 75)).mean()
cosines = [long_tail.cosines(spec, layers[sink_layer], center) for center in (True, False)]
directions = {name: {n: statistics[name]["mean"] for n, statistics in shape.items()}
              for name in shape[0] if name != "deviations"}  # fmt: skip
sink_layers = [n for n, share in weight.items() if share > 0.2]
loss_rise = {
    name: np.subtract(policy_losses, losses["full"]).mean()
    for name, policy_losses in losses.items()
}
default_only = {
    "first layer: a sample by weight has the lowest error in every head": (lead[first] < 1).all(),
    "first layer: top-k has a higher mean error than a uniform sample": (
        top[first].mean() > 1.1 * uniform[first].mean()
    ),
    "later layers: top-k has the lowest error in most heads": (
        np.mean((top < np.minimum(oracle, uniform))[~first]) > 0.5
    ),
    "later layers: a sample by weight has the lowest error in a few heads": (
        0 < (lead[~first] < 1).sum() < (~first).sum() / 4
    ),
    "where a fifth of the keys has more than 95 % of the weight, top-k has the lowest error": (
        peaked.any() and (top < np.minimum(oracle, uniform))[peaked].all()
    ),
    "a uniform sample has the lowest error in no head": (uniform > np.minimum(oracle, top)).all(),
    "in the flattest head, top-k has the highest error at every budget": (
        (flattest["topk"] > np.maximum(flattest["oracle"], flattest["uniform"])).all()
    ),
    "in the second head, the errors of top-k and of a sample by weight cross": (
        between["oracle"][0] < between["topk"][0] and between["topk"][-1] < between["oracle"][-1]
    ),
    "in the most peaked head, top-k has the lowest error at every budget": (
        (peak["topk"] < np.minimum(peak["oracle"], peak["uniform"])).all()
    ),
    "the last two layers have a sink, the others have none": (
        sink_layers == list(layers)[-2:] and sum(share < 0.05 for share in weight.values()) == 2
    ),
    "the value of a sink is less than half as long as others": all(
        (directions["value of the sink over others"][n] < 0.5) == (n in sink_layers) for n in layers
    ),
    "queries point away from the mean key, but in the first layer": all(
        (directions["query with mean key"][n] < -0.1) == (n != 0) for n in layers
    ),
    "only the key of a sink points towards the queries": all(
        (directions["query with sink key"][n] > 0.2) == (n in sink_layers) for n in layers
    ),
    "of the sinks' keys, one has a negative cosine with the mean key": (
        sum(directions["sink key with mean key"][n] < 0 for n in sink_layers) == 1
    ),
    "without a sink, the first key has the direction of the mean key": all(
        directions["sink key with mean key"][n] > 0.5 for n in layers if n not in sink_layers
    ),
    "most uncentred keys are at more than 90 degrees, centred ones are around 90": (
        np.mean(cosines[1] < 0) > 0.9 and abs(cosines[0].mean()) < 0.05
    ),
    "top-k gains nothing if the sink is always read": (
        abs(apart["topk"].error / among["topk"].error - 1) < 0.05
    ),
    "a sample by weight gains": apart["oracle"].error < 0.85 * among["oracle"].error,
    "a uniform sample usually lacks the sink": apart["uniform"].error < 0.7 * among["uniform"].error,
    "hash tables often miss the sink": found_sink < 0.7,
    "if it is always read, their error is much lower": (
        hashed.error < 0.6 * among[long_tail.CENTRED].error
    ),
    "without centring, they find few keys": (
        uncentred.share < 0.2 * hashed.share and uncentred.error > 2 * hashed.error
    ),
    "with the sink apart, top-k has the lowest error": (
        apart["topk"].error < min(apart[way].error for way in apart if way != "topk")
    ),
    "tables find more keys when centred": all(
        read[*pair, True].share > 1.3 * read[*pair, False].share for pair in pairs
    ),
    "the more keys are read, the lower the error": (
        (fall := [read[*pair, True].error for pair in pairs]) == sorted(fall, reverse=True)
    ),
    "about a tenth of the keys is read": (
        all(0.07 < part[name] < 0.13 for name in ("uniform", "magicpig", "topk", "vattention"))
    ),
    "a sample by weight draws some keys twice": part["oracle"] < part["topk"],
    "a uniform sample raises the loss less than the ends alone": (
        loss_rise["uniform"] < 0.9 * loss_rise["ends alone"]
    ),
    "each of the other policies, less than half of that": (
        max(loss_rise[name] for name in chosen if name not in ("uniform", "ends alone"))
        < 0.5 * loss_rise["uniform"]
    ),
} if not runtime.SMOKE else {}  # fmt: skip
large, small, loose = (curve.error for curve in synthetic.values())
long = next(iter(synthetic.values())).fifth < 0.9
always = {
    "synthetic: a sample by weight beats top-k where the tail is flat": (
        large["topk"][0] > 2 * large["oracle"][0] and small["topk"][0] > 2 * small["oracle"][0]
    ),
    "synthetic: top-k improves as the tail gets shorter": (
        all((np.diff(errors["oracle"] / errors["topk"]) > 0).all() for errors in (large, small))
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
    "more tables of fewer bits read more": (
        (shares := [read[*pair, True].share for pair in pairs]) == sorted(shares)
    ),
}
is_smollm2 = llm.name.startswith("SmolLM2")
runtime.verify("" if is_smollm2 else "another model", always, default_only)
