# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/05_train_a_sink.ipynb)
#
# # Train a sink
#
# Small models of two kinds, alike but for a learnable sink token in front of every sample
# ([StreamingLLM](https://arxiv.org/abs/2309.17453), section 3.3): how well they learn, what their
# heads look at, and what each needs of a cache. The third cell says where it has been run, and how
# long it took.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("05_train_a_sink")

# %% [markdown]
# ## A head with nothing to do
#
# The models read letters (after [Guo et al.](https://arxiv.org/abs/2410.13835)). Each letter follows
# the one before it by chance, but for twenty *triggers*: after a trigger comes the letter that stood
# before it. One head is enough for that, and at every letter that is no trigger this head has nothing
# to do. Triggers are marked by a dot:

# %%
from jaxkv.evals.training import backcopy

chain = backcopy.Chain(0)
some = chain.letters(60, seed=1)
print("".join(backcopy.LETTERS[i] + ("." if i in chain.triggers else "") for i in some))

# %% [markdown]
# ## Two variants
#
# `none` is plain softmax. `token` has one more token, which stands in front of every sample and is
# learnt like any other; it says nothing, so a head may look at it for free. `jaxkv pretrain` trains
# both by the same recipe, here a model of one layer with one head and samples of 48 letters. Each is
# trained from several seeds.

# %%
import tempfile
from pathlib import Path

from jaxkv.colab import sink_variants

folder, steps = Path(tempfile.mkdtemp()), runtime.size(800, 400)
SEEDS = runtime.size((1, 2, 0), (1,))
runs = [sink_variants.train(["none", "token"], steps, seed, folder) for seed in SEEDS]
trained, (letters, *_) = zip(*runs, strict=True)
floor = chain.floor(chain.letters(200_000, 99))


# %%
def of_each(measure):
    return [
        {name: measure(variant, letters) for name, variant in found.items()} for found in trained
    ]


places, shares = of_each(sink_variants.loss_by_place), of_each(sink_variants.share_of_first)
sink_variants.draw_learning(places, shares, floor)

# %% [markdown]
# On the left is the loss of a letter by its place in a sample. The sink token has the place of the
# first letter, so this variant must predict the letter after it from nothing, and the next one too where
# it copies what was not seen. From the third place on both variants have the same task:

# %%
late = [
    {name: loss[sink_variants.ALIKE :].mean() for name, loss in found.items()} for found in places
]
for seed, loss in zip(SEEDS, late, strict=True):
    print(f"seed {seed}: none {loss['none']:.4f}, token {loss['token']:.4f}")

# %% [markdown]
# There the two are within 0.02 nats of each other, which
# [CLAIMS.md](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md) counts as no difference. So
# while a sample is read whole the sink is no gain: it costs a place in it.
#
# On the right is how much of its attention each idle letter gives to the first token of its sample,
# in the mean: with plain softmax hardly any, with a sink token some letters much. How many letters do
# so differs from seed to seed, but no seed here has none.
#
# ## What they look at
#
# A row is a letter, a column what it looks at. The models are those of the first seed, and of many
# stretches of the text this is the one in which the sink gets most. What stands after a trigger is
# known, so a trigger, with a dot, looks one back. An idle letter looks at itself, which tells it
# nothing new, or, where one was trained, at the sink.

# %% tags=["picture"]
start = sink_variants.most_idle(trained[0]["token"], letters, 15)
sink_variants.draw_maps(trained[0], letters, 15, start)

# %% [markdown]
# ## Streaming with one sink
#
# All now read a text much longer than a sample, under caches of 24 tokens: the newest alone, or one,
# two or four of the first tokens beside fewer of the newest.

# %%
CACHES = {"0 + 24": "window:window=24"}
CACHES |= {f"{n} + {24 - n}": f"streaming:sinks={n},window={24 - n}" for n in (1, 2, 4)}
count = runtime.size(20_000, 4_000)
found = of_each(
    lambda variant, of: sink_variants.losses(
        variant, sink_variants.held_back(variant, of, count), CACHES
    )
)
context = trained[0]["none"].config.context
print(f"{count:,} letters, {count // context} times as many as in a sample")
named = [{f"{variant}, seed {seed}": loss for variant, loss in one.items()}
         for seed, one in zip(SEEDS, found, strict=True)]  # fmt: skip
runtime.Text(sink_variants.table({name: loss for one in named for name, loss in one.items()}))

# %%
sink_variants.draw_losses(found, floor)

# %% [markdown]
# Where a sink token was trained the cache must keep it, and then one is enough: more of the first
# tokens bring nothing. The model with plain softmax does not care: it grew no sink, so it has none to
# lose. A window alone is safe for such a model, and whether a model is such cannot be seen from
# outside: keep the first tokens. More variants and tries to make plain softmax grow a sink are in
# [backcopy.json](https://github.com/jaxkv/jaxkv/blob/main/evals/results/backcopy.json), and what they
# say of the paper in [CLAIMS.md](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md).
#
# ## A larger one
#
# The same on text, in a terminal:
#
# ```bash
# jaxkv data --text books/train --valid books/valid --vocab-size 4096 --out tokens
# jaxkv pretrain --preset tiny --data tokens --out run --set sinks=token
# jaxkv generate "Once upon a time" --model run/hf --policy streaming:sinks=1,window=255
# ```
#
# `--preset default` is the model that comes with jaxkv, `--preset 160m` the size of the paper's, which
# wants a GPU.
#
# The next cell checks these results and fails if one of them does not hold.

# %%
NEAR = runtime.size(0.02, 0.05)  # nats; half as many steps leave more of a difference


looks = of_each(sink_variants.looks)


def in_every_seed(of, holds):
    return all(holds(*one.values()) for one in of)


runtime.verify(
    "",
    always={
        "the first two predicted letters are harder with a sink token in the first one's place":
            in_every_seed(places, lambda none, token: bool((token > none + 0.3)[: sink_variants.ALIKE].all())),
        f"from the third on the arms are within {NEAR} nats":
            in_every_seed(late, lambda none, token: bool(abs(token - none) < NEAR)),
        "some idle letter gives a sink token more than 0.2 of its attention":
            in_every_seed(shares, lambda none, token: bool(token[0] > 0.2)),
        "none gives the first letter more than 0.1 where there is no sink":
            in_every_seed(shares, lambda none, token: bool(none[0] < 0.1)),
        "a trigger looks one back, in the mean with more than half of its attention":
            in_every_seed(looks, lambda none, token: min(none[0], token[0]) > 0.5),
        "any other letter looks at itself or the sink, in the mean with more than 0.8":
            in_every_seed(looks, lambda none, token: min(none[1], token[1]) > 0.8),
        "without its sink token a model reads worse, by more than 0.02 nats":
            in_every_seed(found, lambda none, token: token["0 + 24"] > token["1 + 23"] + 0.02),
        "with it one of the first tokens is enough: four change less than a fifth of that":
            in_every_seed(found, lambda none, token: abs(token["4 + 20"] - token["1 + 23"])
                          < 0.2 * (token["0 + 24"] - token["1 + 23"])),
        "with plain softmax no cache is more than 0.01 nats from another":
            in_every_seed(found, lambda none, token: max(none.values()) - min(none.values()) < 0.01),
    },
    ours={},
)  # fmt: skip
