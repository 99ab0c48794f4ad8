# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/05_train_a_sink.ipynb)
#
# # Train a sink
#
# This notebook trains small models in two variants. They differ only in a learnable sink token in
# front of every training sample ([StreamingLLM](https://arxiv.org/abs/2309.17453), section 3.3). The
# notebook compares the losses of the variants, the attention of their heads, and the tokens that a
# cache must store for each. The third cell lists the devices on which this notebook has run and its
# run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("05_train_a_sink")

# %% [markdown]
# ## An idle head
#
# The training data are letters, as in [Guo et al.](https://arxiv.org/abs/2410.13835). Twenty letters
# are *triggers*: the letter after a trigger is a copy of the letter before the trigger. Every other
# letter depends at random on the letter before it. One attention head can learn to copy. At every
# letter that is no trigger, this head is idle. In the sample below, a dot marks each trigger:

# %%
from jaxkv.evals.training import backcopy

chain = backcopy.LetterChain(0)
sample_letters = chain.letters(60, seed=1)
print("".join(backcopy.LETTERS[i] + ("." if i in chain.triggers else "") for i in sample_letters))

# %% [markdown]
# ## Two variants
#
# `none` is plain softmax. `token` has one additional token in front of every sample, with a learnt
# embedding like any other token. This token has no information, so an idle head can attend to it
# without effect. `jaxkv pretrain` trains both variants with the same recipe, here with one layer, one
# head, samples of 48 letters and several seeds.

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
        {name: measure(variant, letters) for name, variant in variants.items()}
        for variants in trained
    ]


by_position = of_each(sink_variants.loss_by_position)
on_first = of_each(sink_variants.first_token_attention)
sink_variants.draw_learning(by_position, on_first, floor)

# %% [markdown]
# **What to see.** The left panel shows the loss by position in a sample. The sink token replaces the
# first letter of a sample. So this variant must predict the second letter without context. It must
# also predict the third letter without context if that is a copy of the missing letter. From the
# third position on, both variants have the same task:

# %%
late_from = sink_variants.COMPARABLE_FROM
late = [
    {name: loss[late_from:].mean() for name, loss in variants.items()} for variants in by_position
]
for seed, loss in zip(SEEDS, late, strict=True):
    print(f"seed {seed}: none {loss['none']:.4f}, token {loss['token']:.4f}")

# %% [markdown]
# From there on, the losses of the two variants differ by less than 0.02 nats, which
# [CLAIMS.md](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md) counts as no difference. So
# within the trained context, the sink token does not lower the loss, and it takes one position.
#
# The right panel shows the mean attention of each idle letter to the first token. With plain
# softmax it is almost zero. With a sink token, some letters give much attention to it. The number of
# these letters varies with the seed, but with every seed there are some.
#
# ## What the heads attend to
#
# In the attention maps below, each row is a query letter and each column is a key. The models are
# those of the first seed. Of many stretches of text, the maps show the one in which the sink gets
# most attention. A trigger (with a dot) attends to the letter before it, because the next letter is
# a copy of that letter. An idle letter attends to itself, which adds no information, or to the sink
# if the model has one.

# %% tags=["picture"]
start = sink_variants.find_idle_stretch(trained[0]["token"], letters, 15)
sink_variants.draw_maps(trained[0], letters, 15, start)

# %% [markdown]
# ## Streaming with one sink
#
# All models now read a text that is much longer than a sample, with caches of 24 tokens. The caches
# store the newest tokens only, or one, two or four of the first tokens and fewer of the newest.

# %%
CACHES = {"0 + 24": "window:window=24"}
CACHES |= {f"{n} + {24 - n}": f"streaming:sinks={n},window={24 - n}" for n in (1, 2, 4)}
count = runtime.size(20_000, 4_000)
losses = of_each(
    lambda variant, letters: sink_variants.losses(
        variant, sink_variants.held_out(variant, letters, count), CACHES
    )
)

# %%
context = trained[0]["none"].config.context
print(f"{count:,} letters, {count // context} times the length of a sample")
named = [{f"{variant}, seed {seed}": loss for variant, loss in variants.items()}
         for seed, variants in zip(SEEDS, losses, strict=True)]  # fmt: skip
runtime.TextBox(
    sink_variants.loss_table({name: loss for table in named for name, loss in table.items()})
)

# %%
sink_variants.draw_losses(losses, floor)

# %% [markdown]
# **What to see.** A model trained with a sink token needs it in the cache, and one sink is enough:
# more first tokens do not lower the loss. The model with plain softmax has learnt no sink, so its
# loss is the same with every cache. A plain window is safe for such a model. But you do not know in
# advance whether a model has sinks, so cache the first tokens.
#
# [backcopy.json](https://github.com/jaxkv/jaxkv/blob/main/evals/results/backcopy.json) has more
# variants, and attempts to train a sink with plain softmax.
# [CLAIMS.md](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md) compares the results with the
# paper.
#
# ## A larger model
#
# To train on text, run these commands in a terminal:
#
# ```bash
# jaxkv data --text books/train --valid books/valid --vocab-size 4096 --out tokens
# jaxkv pretrain --preset tiny --data tokens --out run --set sinks=token
# jaxkv generate "Once upon a time" --model run/hf --policy streaming:sinks=1,window=255
# ```
#
# `--preset default` is the recipe of jaxkv's default model. `--preset 160m` has the size of the
# paper's models and needs a GPU.
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
NEAR = runtime.size(0.02, 0.05)  # nats; with half as many steps, the difference is larger


attention = of_each(sink_variants.mean_attention)


def in_every_seed(by_seed, holds):
    return all(holds(*variants.values()) for variants in by_seed)


runtime.verify(
    "",
    always={
        "with a sink token, the first two predictions have a higher loss":
            in_every_seed(by_position,
                          lambda none, token: bool((token > none + 0.3)[:late_from].all())),
        f"from the third on, the variants are within {NEAR} nats":
            in_every_seed(late, lambda none, token: bool(abs(token - none) < NEAR)),
        "some idle letter gives a sink token more than 0.2 of its attention":
            in_every_seed(on_first, lambda none, token: bool(token[0] > 0.2)),
        "without a sink token, no idle letter gives the first letter more than 0.1":
            in_every_seed(on_first, lambda none, token: bool(none[0] < 0.1)),
        "triggers give the letter before them more than half of their attention, on average":
            in_every_seed(attention, lambda none, token: min(none[0], token[0]) > 0.5),
        "other letters give themselves and the sink more than 0.8, on average":
            in_every_seed(attention, lambda none, token: min(none[1], token[1]) > 0.8),
        "a model that loses its sink token has a loss higher by more than 0.02 nats":
            in_every_seed(losses, lambda none, token: token["0 + 24"] > token["1 + 23"] + 0.02),
        "one sink is enough: four first tokens change less than a fifth of that":
            in_every_seed(losses, lambda none, token: abs(token["4 + 20"] - token["1 + 23"])
                          < 0.2 * (token["0 + 24"] - token["1 + 23"])),
        "with plain softmax, all caches are within 0.01 nats":
            in_every_seed(losses,
                          lambda none, token: max(none.values()) - min(none.values()) < 0.01),
    },
    default_only={},
)  # fmt: skip
