# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/04_sampling_beats_topk.ipynb)
#
# # When sampling beats top-k
#
# A query need not read every key. Should it read those with the largest weights, or a sample drawn by
# weight? [MagicPIG](https://arxiv.org/abs/2410.16179) says: a sample, where attention has a long tail.
# Here is where that is so, where it is not, and how hash tables find such a sample. Runs on a CPU, a
# GPU or a TPU; the third cell says how many minutes.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from evals import runtime

runtime.begin("04_sampling_beats_topk")

# %% [markdown]
# Queries, keys and values are those of a model that reads a novel: the last 64 tokens of each stretch
# ask, and everything before them answers.

# %%
import models
from evals import heads, long_tail

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
spec, count = llm.spec, runtime.size(8, 2)
every = heads.layers_of(llm, runtime.passage(llm, count * llm.config.context), count)
layers = {n: every[n] for n in (0, (len(every) - 1) // 2)}  # the first, and one in the middle

# %% [markdown]
# ## The long tail
#
# Sort the keys of a query by their weight. How much have the heaviest together? A head whose line
# climbs at once needs few keys; where it is nearly straight all count alike, and whatever leaves keys
# out for good leaves out what they say together.

# %%
tails = {n: long_tail.tails(spec, layer) for n, layer in layers.items()}
long_tail.draw_tails(tails)

# %%
for n, layer in layers.items():
    fifth = tails[n][:, tails[n].shape[1] // 5 - 1]
    print(f"layer {n}: a fifth of the keys has {fifth.min():.0%} to {fifth.max():.0%} of the weight, "
          f"the first token {long_tail.sink(spec, layer):.1%}")  # fmt: skip

# %% [markdown]
# The paper's models give the first token, the *sink*, most of their weight. This one, which is small,
# does not.
#
# ## Top-k, or a sample?
#
# `topk` reads the keys with the largest logits. `oracle` draws keys by their weight, which nobody can
# know without reading all, and averages their values: an estimate that is right in the mean. `uniform`
# draws any.

# %% tags=["picture"]
budgets = runtime.size((0.01, 0.02, 0.05, 0.1, 0.2, 0.4), (0.02, 0.1))
found = {n: long_tail.budgets(spec, x, budgets, runtime.size(3, 1)) for n, x in layers.items()}
long_tail.draw_budgets(found, budgets)

# %% [markdown]
# In the first layer attention is flat, and top-k is worse than even chance: the keys with the largest
# logits speak for themselves alone. In the middle a few keys have most of the weight, and top-k wins.
# So neither is best everywhere. [vAttention](https://arxiv.org/abs/2510.05688) reads the heaviest and a
# sample of the rest (policy `vattention`).
#
# ## How tables find a sample
#
# MagicPIG hashes keys by the signs of K random projections, L times, and meets the keys that have the
# query's code in at least two of the L tables. The chance of that follows from the angle between query
# and key, so a key that is met can be weighted by one over its chance. In the paper's models all keys
# point away from the query, so that as they are hardly one would be found; they are hashed less their
# mean, and then their differences decide. Here the mean is smaller: centring (blue) moves keys a little
# towards the query, which is enough to find about twice as many.

# %%
long_tail.draw_chances(spec, layers[0], long_tail.PAIRS[:3])

# %% [markdown]
# ## Choosing K and L
#
# More bits K make codes rarer, more tables L give more chances: both together set how many keys are
# read. Each table takes two bytes a key, four where there are more than 65,535.

# %%
pairs = runtime.size(long_tail.PAIRS, long_tail.PAIRS[2:])
read = long_tail.tables(spec, layers, pairs, runtime.size(2, 1))
runtime.Text(long_tail.told(read, llm.config.context))

# %% [markdown]
# Read as many as the error allows, with the smallest L that does so. For a model and a text of yours
# `python -m evals.tune_lsh --text book.txt` finds K and L.
#
# ## As policies
#
# Behind prompts of three quarters of the context: what does it cost to read about a tenth of the keys?

# %%
ENDS = f"sinks={long_tail.SINKS},window={long_tail.WINDOW}"
policies = {
    "magicpig": f"magicpig:K=8,L=75,{ENDS}",
    "topk": f"topk:share=0.1,{ENDS}",
    "oracle": f"oracle:share=0.1,{ENDS}",
    "vattention": f"vattention:top=0.05,base=0.05,{ENDS}",
}
policies = dict(list(policies.items())[: runtime.size(4, 1)])
text = runtime.passage(llm, runtime.size(7_000, 2_000))
behind = long_tail.losses(llm, text, policies, runtime.size(12, 2))
for name, over in behind.items():
    print(f"{name:12} loss over full attention's {over['mean']:+.4f} "
          f"± {over['two_errors']['stretches']:.4f}")  # fmt: skip

# %% [markdown]
# `magicpig` is the only one of these that need not look at every key to choose, so the only one that
# can save time; it pays for that by keys that are met by chance. It does so on a CPU behind prompts of
# tens of thousands of tokens
# ([measured](https://github.com/jaxkv/jaxkv/blob/main/evals/results/sparse.png)); for short ones, read
# everything.
#
# The cell below fails if anything above was not as it says.

# %%
flat, peaked = (n for n in layers)
tenth = budgets.index(0.1)
error = {n: {kind: line[tenth].error for kind, line in kinds.items()} for n, kinds in found.items()}
assert tails[flat].mean() < tails[peaked].mean()
assert (
    error[flat]["oracle"] < error[flat]["topk"] and error[peaked]["topk"] < error[peaked]["oracle"]
)
assert all(own.share > read[bits, tables, False].share
           for (bits, tables, center), own in read.items() if center)  # fmt: skip
few, many = read[*pairs[0], True], read[*pairs[-1], True]
assert few.share < many.share and few.error > many.error
assert all(abs(over["mean"]) < 0.2 for over in behind.values())
print("as it should be")
