# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/04_sampling_beats_topk.ipynb)
#
# # When sampling beats top-k
#
# A query need not read every key. Should it read those with the largest weights, or a sample drawn by
# weight? [MagicPIG](https://arxiv.org/abs/2410.16179) says: a sample, where attention has a long tail.
# Here is where that is so, where it is not, and how hash tables find such a sample. The third cell
# says where it has been run, and how long it took.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("04_sampling_beats_topk")

# %% [markdown]
# Queries, keys and values are those of a model that reads a novel. It is a small one of our own, which
# comes with the package; put the Hub id of any Llama-family model into the field to take that one. The
# last 64 tokens of each stretch ask, and everything up to them answers.

# %%
from jaxkv import models
from jaxkv.colab import long_tail
from jaxkv.colab import long_tail_figures as figures
from jaxkv.evals.magicpig import heads

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
spec, count, length = llm.spec, runtime.size(8, 2), min(llm.config.context, 512)
ids = runtime.passage(llm, count * length)
layers = long_tail.some(heads.layers_of(llm, ids, count))
print(f"{llm.folder.name}: {len(layers)} of {llm.config.layers} layers are looked at")

# %% [markdown]
# ## The long tail
#
# Sort the keys of a query by their weight. How much have the heaviest together? A head whose line
# climbs at once needs few keys. Where it is straight all keys count alike. In between is the *long
# tail*: few keys have much each, and very many have a little, which together is not little.

# %%
tails = {n: long_tail.tails(spec, layer) for n, layer in layers.items()}
figures.draw_tails(tails)

# %% [markdown]
# ## Top-k, or a sample?
#
# Three ways to read one key in twenty:
#
# - **topk** reads the keys with the largest weights, and takes them for all.
# - **oracle** draws keys by their weight and averages their values. That is right in the mean. Nobody
#   can do it without reading all keys first: it is what MagicPIG comes near to.
# - **uniform** draws any keys; each counts by its weight.
#
# The error is the distance from attention to all keys, over the length of the latter.

# %%
share, seeds = 0.05, runtime.size(3, 1)
by_head = long_tail.by_head(spec, layers, share, seeds)
runtime.Text(long_tail.tell_heads(spec, layers, by_head))

# %% [markdown]
# In our model top-k is nearest in most heads, and in each where a fifth of the keys has more than nine
# tenths of the weight. In the first layer it is the farthest of the three:
# there attention is flat, and the keys with the largest weights speak for themselves alone. A sample
# is better, but it need not be drawn by weight: any keys do about as well.
#
# In a few heads of the layers after it a sample by weight is nearest. Their tails are long: too much
# weight for top-k lies in the tail, and too little for even chance. Here are three heads: the flattest,
# that in which a sample by weight gains the most over the better of the two others, and the most
# peaked.

# %%
budgets = runtime.size((0.01, 0.02, 0.05, 0.1, 0.2, 0.4), (0.02, 0.05))
of_head, reported = {}, long_tail.telling(by_head)
for name, at in reported.items():
    n, head = by_head.layer[at], by_head.head[at]
    one = long_tail.alone(spec, layers[n], head)
    of_head[f"{name}:\nlayer {n}, head {head}"] = long_tail.budgets(*one, budgets, seeds)
figures.draw_budgets(of_head, budgets)

# %% [markdown]
# ## Why
#
# Now keys that are drawn, so that the cause is known. Logits are normal numbers: the larger their
# deviation, the shorter the tail. Values follow the logit in part, so heavy keys say something else
# than light ones. At right each line goes from a flat tail to a short one; at left are the heads of
# the model, a dot of each colour for a head. Below the blue line a sample is nearer than top-k.

# %% tags=["picture"]
few, many, sigmas = runtime.size((512, 4_096, long_tail.SIGMAS), (256, 2_048, (0.25, 1.5, 3.0)))
worlds = {
    f"{many:,} keys": long_tail.world(many, sigmas, share, 0.45, (*long_tail.KINDS, "magicpig")),
    f"{few:,} keys": long_tail.world(few, sigmas, share, 0.45),
    f"{few:,}, any values": long_tail.world(few, sigmas, share, 0.0),
}
caption = (
    f"{share:.0%} of the keys read. Dotted: values that do not follow the weight. Drawn logits have "
    f"deviations of {', '.join(f'{each:g}' for each in sigmas)}."
)
figures.draw_when(by_head, worlds, share, caption)

# %% [markdown]
# Three things make a sample by weight win.
#
# - **The tail is long.** With the same number of keys, top-k gains as the tail gets shorter, and with
#   few keys it wins in the end.
# - **Heavy keys say something else than light ones.** Where values do not follow the weight (dotted),
#   the heaviest keys stand well for the others, and top-k is as near as a sample or nearer.
# - **There are many keys.** One in twenty of eight times as many keys are eight times as many draws.
#   Chance averages out; what top-k leaves out does not.
#
# The last is a difference to the paper: its models read 16 thousand tokens and more, where this one
# reads hundreds. `magicpig` draws as many keys by tables, by a chance that only roughly
# follows the weight. Where many keys are and the tail is long it is far nearer than top-k.
#
# So neither is best everywhere. [vAttention](https://arxiv.org/abs/2510.05688) reads the heaviest and a
# sample of the rest (policy `vattention`).
#
# ## How tables find a sample
#
# MagicPIG hashes keys by the signs of K random projections, L times, and attends to the keys that have the
# query's code in at least two of the L tables. The chance of that follows from the angle between query
# and key. So a key that is attended to can be weighted by one over its chance, and the estimates of attention's
# sums are right in the mean.

# %%
figures.draw_chances(spec, layers[0], long_tail.PAIRS[:3])

# %% [markdown]
# In the first layer of our model, above, most keys stand nearer to a right angle with the query than to
# its direction. There few are found, and the nearer a key is, the more often. Keys are hashed less
# their mean. Here that moves them a little towards the query.
#
# ## The sink, and centring
#
# In the paper's models two things stand in the way of a sample. All keys lie in a cone, and queries
# point away from it: no key would be found. And the first token, the *sink*, lies where queries point
# and gets most of the weight, while its value says little. In our model the table above shows no sink.
# So here is a drawn one: keys in a cone opposite to the query, and a sink with half of the weight.

# %%
beside = long_tail.beside_a_sink(many, share)
runtime.Text(long_tail.tell_sink(beside))

# %% [markdown]
# - A sample by weight spends half of its draws on the sink, which is one key. If the sink is always
#   read, beside the sample, all draws go to the others.
# - An even sample misses the sink nearly always, and with it half of the weight.
# - Tables find the sink by themselves, for it lies near the query; `magicpig` reads it always.
# - Without centring tables find next to nothing. Less their mean, keys are distinguished by their
#   differences. Softmax does not see the mean: it adds the same to all logits of a query.
#
# ## Choosing K and L
#
# More bits K make codes rarer, more tables L give more chances: both together set how many keys are
# read. Each table takes two bytes a key, four where there are more than 65,535. Below are the means
# over the first layer and one in the middle.

# %%
pairs = runtime.size(long_tail.PAIRS, long_tail.PAIRS[2:])
two = {n: layers[n] for n in (0, list(layers)[(len(layers) - 1) // 2])}
read = long_tail.tables(spec, two, pairs, runtime.size(2, 1))
runtime.Text(long_tail.tell_tables(read))

# %% [markdown]
# Read as many as the error allows, with the smallest L that does so. For a model and a text of yours
# `python -m jaxkv.evals.magicpig.tune_lsh --text book.txt` finds K and L.
#
# ## As policies
#
# Prompts are three quarters of a stretch, and what follows is scored. The first 4 tokens and the newest
# 16 are always read, and of the keys between about a tenth. `ends alone` reads none of them.

# %%
policies = long_tail.ways(0.1, (8, 75))
part = long_tail.read_by(spec, layers, policies)
scored = dict(list(policies.items())[: runtime.size(len(policies), 3)])
after_prompt = long_tail.losses(llm, ids, count, scored)
runtime.Text(long_tail.tell_losses(after_prompt, part))

# %% [markdown]
# In our model's losses what lies between the ends counts, and an even sample of it brings back a part.
# Each of the others loses less than half of what the even sample does. Draws of `oracle` that fall on
# one key read it once, so it reads fewer.
#
# `magicpig` is the only one of those four that need not look at every key to choose, so the only one
# that can save time; it pays for that by keys that are attended to by chance. It does so on a CPU behind
# prompts of tens of thousands of tokens
# ([measured](https://github.com/jaxkv/jaxkv/blob/main/evals/results/sparse.png)); for short ones, read
# everything.
#
# The next cell checks these results and fails if one of them does not hold.

# %%
import numpy as np

by_weight, top, even = (by_head.error[kind] for kind in ("oracle", "topk", "uniform"))
first, peaked, lead = by_head.layer == 0, by_head.fifth > 0.9, long_tail.lead(by_head)
flattest, between, peak = (
    {k: [x.error for x in v] for k, v in of.items()} for of in of_head.values()
)
centred = {pair: read[*pair, True].share / read[*pair, False].share for pair in pairs}
cosines = [long_tail.cosines(spec, layers[0], center) for center in (True, False)]
lost = {name: over["mean"] for name, over in after_prompt.items()}
ours = {
    "top-k is nearest in most heads": np.mean((top < by_weight) & (top < even)) > 0.5,
    "in each head of the first layer top-k is the farthest": (
        (top > 1.3 * np.maximum(by_weight, even))[first].all()
    ),
    "there any keys do about as well as those drawn by weight": (
        abs((by_weight / even)[first].mean() - 1) < 0.15
    ),
    "behind it a sample by weight is nearest in a few heads": (
        0 < (lead[~first] < 0.95).sum() < len(lead) / 4
    ),
    "where a fifth of the keys has more than 90 % of the weight, top-k is nearest": (
        peaked.any() and (top < np.minimum(by_weight, even))[peaked].all()
    ),
    "in the flattest head top-k is the farthest at every budget": (
        np.greater(flattest["topk"], np.maximum(flattest["oracle"], flattest["uniform"])).all()
    ),
    "in the second head a sample by weight is nearest at a twentieth": (
        1.05 * between["oracle"][budgets.index(share)]
        < min(between[kind][budgets.index(share)] for kind in ("topk", "uniform"))
    ),
    "in the most peaked head top-k is nearest at every budget": (
        np.less(peak["topk"], np.minimum(peak["oracle"], peak["uniform"])).all()
    ),
    "centring moves keys of the first layer towards the query": cosines[0].mean()
    > cosines[1].mean() + 0.01,
    "most of those keys are nearer to a right angle": np.mean(np.abs(cosines[0]) < 0.5) > 0.8,
    "there is no sink": max(long_tail.sink(spec, layer) for layer in layers.values()) < 0.05,
    "tables find more keys when centred": min(centred.values()) > 1.2,
    "an even sample loses less than the ends alone": lost["uniform"] < 0.8 * lost["ends alone"],
    "each of the others loses less than half of that": (
        max(lost[name] for name in lost.keys() - {"ends alone", "uniform"}) < 0.5 * lost["uniform"]
    ),
    "about a tenth of the keys is read": (
        all(0.08 < part[name] < 0.12 for name in ("uniform", "magicpig", "topk", "vattention"))
    ),
}
large, small, loose = (world.error for world in worlds.values())
long = next(iter(worlds.values())).fifth < 0.9
apart, among = beside["always read"], beside["among the rest"]
always = {
    "drawn: a sample by weight is nearer than top-k where the tail is flat": (
        large["topk"][0] > 2 * large["oracle"][0] and small["topk"][0] > 2 * small["oracle"][0]
    ),
    "drawn: top-k gains as the tail gets shorter": (
        all((np.diff(of["oracle"] / of["topk"]) > 0).all() for of in (large, small))
    ),
    "drawn: with few keys it wins in the end": small["topk"][-1] < 0.8 * small["oracle"][-1],
    "drawn: where values do not follow the weight it is as near as a sample": (
        (loose["topk"] < 1.1 * loose["oracle"]).all()
    ),
    "drawn: with more keys a sample gains": (
        (large["oracle"] / large["topk"] < 0.7 * small["oracle"] / small["topk"]).all()
    ),
    "drawn: with many keys and a long tail magicpig is far nearer than top-k": (
        (large["magicpig"] < 0.5 * large["topk"])[long].all()
    ),
    "an even sample misses the sink": among["uniform"].error > 3 * apart["uniform"].error,
    "a sample by weight gains where the sink is always read": (
        apart["oracle"].error < 0.8 * among["oracle"].error
    ),
    "magicpig finds the sink by itself": (
        0.8 < apart["magicpig"].error / among["magicpig"].error < 1.25
    ),
    "without centring tables find next to nothing": (
        apart[long_tail.BARE].share < 0.005
        and apart[long_tail.BARE].error > 3 * apart["magicpig"].error
    ),
    "more tables of fewer bits read more": (
        read[*pairs[0], True].share < read[*pairs[-1], True].share
    ),
    "a sample by weight reads some keys twice": part["oracle"] < part["topk"],
}
runtime.verify(MODEL, always=always, ours=ours)
