# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/04_sampling_beats_topk.ipynb)
#
# # When sampling beats top-k
#
# A query need not read every key. Should it read the keys with the largest attention weights, or a
# random sample drawn by weight? [MagicPIG](https://arxiv.org/abs/2410.16179) argues for sampling
# where attention has a long tail. This notebook shows where that holds, where it does not, and how
# hash tables find such a sample. The third cell lists the devices on which this notebook has run
# and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("04_sampling_beats_topk")

# %% [markdown]
# Queries, keys and values come from a model that reads a novel. The default model comes with the
# package and is small. To use another model, put the Hub id of any Llama-family model into the
# field below. The last 64 tokens of each stretch are the queries. They attend to all tokens before
# them.

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
# Sort the keys of a query by attention weight and add the weights up, heaviest first. Each curve
# below is one head. If a curve rises steeply, a few keys carry all the weight. If it is a straight
# line, all keys weigh the same. In between lies the *long tail*: few keys with much weight, and
# many keys with little weight each, which together matter.

# %%
tails = {n: long_tail.cumulative_weights(spec, layer) for n, layer in layers.items()}
figures.draw_tails(tails)

# %% [markdown]
# ## Top-k or a sample?
#
# Compare three ways to read one key in twenty:
#
# - **topk** reads the keys with the largest weights and ignores the others.
# - **oracle** draws keys by weight and averages their values. The estimate is unbiased, but drawing
#   by weight requires reading every key first. MagicPIG approximates it.
# - **uniform** draws keys uniformly and weights each by its attention.
#
# The relative error is the distance from the exact attention output, divided by the norm of that
# output.

# %%
share, seeds = 0.05, runtime.size(3, 1)
by_head = long_tail.measure_heads(spec, layers, share, seeds)
runtime.Text(long_tail.heads_table(spec, layers, by_head))

# %% [markdown]
# **What to see.** In the default model, top-k has the lowest error in most heads, and in every head
# where a fifth of the keys has more than nine tenths of the weight. In the first layer it has the
# highest error of the three: attention is flat there, and the keys with the largest weights
# represent only themselves. A sample is better, but it need not be drawn by weight; a uniform
# sample is about as good.
#
# In a few heads of the later layers, sampling by weight has the lowest error. Their tails are long:
# too much weight lies in the tail for top-k, and too little for a uniform sample. The plot below
# shows three heads by budget: the flattest, the one where sampling by weight gains most over the
# better of the other two, and the most peaked.

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
# Synthetic keys make the cause explicit. The logits are normally distributed: the larger their
# standard deviation, the shorter the tail. The values correlate with the logits, so heavy keys have
# different values from light ones. In the right panel, each curve goes from a flat tail to a short
# one. In the left panel, each head of the model is one dot per method. Below the blue line, a
# sample has a lower error than top-k.

# %% tags=["picture"]
few, many, sigmas = runtime.size((512, 4_096, long_tail.SIGMAS), (256, 2_048, (0.25, 1.5, 3.0)))
synthetic = {
    f"{many:,} keys": long_tail.measure_synthetic(
        many, sigmas, share, 0.45, (*long_tail.KINDS, "magicpig")
    ),
    f"{few:,} keys": long_tail.measure_synthetic(few, sigmas, share, 0.45),
    f"{few:,}, independent values": long_tail.measure_synthetic(few, sigmas, share, 0.0),
}
caption = (
    f"{share:.0%} of the keys read. Dotted: values that do not follow the weight. Synthetic logits "
    f"have standard deviations of {', '.join(f'{each:g}' for each in sigmas)}."
)
figures.draw_error_ratio(by_head, synthetic, share, caption)

# %% [markdown]
# **What to see.** Sampling by weight wins under three conditions.
#
# - **The tail is long.** At an equal number of keys, top-k improves as the tail gets shorter. With
#   few keys, it wins in the end.
# - **Heavy keys have different values from light ones.** Where values do not follow the weight
#   (dotted), the heaviest keys represent the others well. Top-k is then as good as a sample or
#   better.
# - **There are many keys.** One in twenty of eight times as many keys is eight times as many draws.
#   The error of a random sample averages out; that of top-k does not.
#
# The third condition explains the difference to the paper: its models read 16 thousand tokens and
# more, while this one reads hundreds. `magicpig` draws as many keys through hash tables, with a
# probability that follows the weight only roughly. With many keys and a long tail, its error is far
# below that of top-k.
#
# So neither method is best everywhere. [vAttention](https://arxiv.org/abs/2510.05688) combines
# them: it reads the heaviest keys and a sample of the rest (policy `vattention`).
#
# ## How hash tables draw a sample
#
# MagicPIG hashes every key L times, each time by the signs of K random projections. A query attends
# to the keys that share its code in at least two of the L tables. The probability of that follows
# from the angle between query and key. Each selected key is weighted by one over this probability,
# so the estimates of attention's sums are unbiased.

# %%
figures.draw_inclusion(spec, layers[0], long_tail.PAIRS[:3])

# %% [markdown]
# **What to see.** In the first layer of the default model (above), most keys are closer to a right
# angle with the query than to its direction. Few keys are found there, and similar keys are found
# more often. The mean key is subtracted before hashing; here that moves the keys slightly towards
# the query.
#
# ## The sink, and centring
#
# Two properties of the paper's models make sampling hard. First, all keys lie in a cone and queries
# point away from it, so no key would be found. Second, the first token, the *sink*, lies in the
# direction of the queries. It receives most of the weight, while its value carries little
# information. According to the table above, the default model has no sink. So the next cell uses
# synthetic keys: a cone opposite to the query, and a sink with half of the weight.

# %%
with_sink = long_tail.measure_with_sink(many, share)
runtime.Text(long_tail.sink_table(with_sink))

# %% [markdown]
# **What to see.**
#
# - A sample by weight spends half of its draws on the sink, which is a single key. If the sink is
#   always read in addition to the sample, all draws go to other keys.
# - A uniform sample almost always misses the sink, and with it half of the weight.
# - Hash tables find the sink without help, because it is close to the query. `magicpig` reads it
#   always.
# - Without centring, the tables find almost nothing. With the mean subtracted, keys are
#   distinguished by their differences. The mean does not affect the softmax, because it adds the
#   same amount to all logits of a query.
#
# ## Choosing K and L
#
# More bits K make codes rarer; more tables L give each key more chances. Together they set how many
# keys are read. Each table takes two bytes per key, or four if there are more than 65,535 keys. The
# table below averages the first layer and one in the middle.

# %%
pairs = runtime.size(long_tail.PAIRS, long_tail.PAIRS[2:])
two = {n: layers[n] for n in (0, list(layers)[(len(layers) - 1) // 2])}
read = long_tail.measure_tables(spec, two, pairs, runtime.size(2, 1))
runtime.Text(long_tail.lsh_table(read))

# %% [markdown]
# Read as many keys as the allowed error requires, with the smallest L that achieves it. For your
# own model and text, `python -m jaxkv.evals.magicpig.tune_lsh --text book.txt` finds K and L.
#
# ## As policies
#
# The prompt is three quarters of a stretch; the rest of the stretch is scored. Every policy reads
# the first 4 tokens, the newest 16 and about a tenth of the keys between. `ends alone` reads none
# of the keys between.

# %%
policies = long_tail.policies_at_share(0.1, (8, 75))
part = long_tail.measure_shares(spec, layers, policies)
scored = dict(list(policies.items())[: runtime.size(len(policies), 3)])
after_prompt = long_tail.measure_losses(llm, ids, count, scored)
runtime.Text(long_tail.loss_table(after_prompt, part))

# %% [markdown]
# **What to see.** The keys between the ends matter for the loss of the default model, and a uniform
# sample recovers part of it. Each of the other policies loses less than half of what the uniform
# sample loses. `oracle` reads fewer keys, because repeated draws of one key read it once.
#
# Of those four policies, only `magicpig` need not look at every key in order to choose, so only it
# can save time. In return, it also attends to keys that collide by chance. On a CPU it is faster
# after prompts of tens of thousands of tokens
# ([measurements](https://github.com/jaxkv/jaxkv/blob/main/evals/results/sparse.png)). For short
# prompts, read all keys.
#
# The next cell checks these results and fails if one of them does not hold.

# %%
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
