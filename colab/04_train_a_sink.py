# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/04_train_a_sink.ipynb)
#
# # Train a sink
#
# This notebook trains small models in two variants. They differ only in a learnable sink token in
# front of every training sample ([StreamingLLM](https://arxiv.org/abs/2309.17453), section 3.3). The
# notebook compares the losses of the variants, the attention of their heads, and the tokens that a
# cache must store for each. The third cell lists the devices on which this notebook has run and its
# run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[serve,train] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("04_train_a_sink")

# %% [markdown]
# ## An idle head
#
# The training data are letters, as in [Guo et al.](https://arxiv.org/abs/2410.13835). Twenty letters
# are *triggers*: the letter after a trigger is a copy of the letter before the trigger. Every other
# letter depends at random on the letter before it. One attention head can learn to copy. At every
# letter that is no trigger, this head is idle. In the sample below, a dot marks each trigger:

# %%
from jaxkv.models.training.letters import LETTERS, LetterChain, write

chain = LetterChain(0)
names = [letter + "." * (i in chain.triggers) for i, letter in enumerate(LETTERS)]
print("".join(names[i] for i in chain.letters(60, seed=1)))

# %% [markdown]
# ## Two variants
#
# `none` is plain softmax. `token` has one additional token in front of every sample, with a learnt
# embedding like any other token. This token has no information, so an idle head can attend to it
# without effect. `jaxkv pretrain` trains both variants with the same recipe, here with one layer, one
# head, samples of 48 letters and several seeds.

# %%
import dataclasses
import tempfile
from pathlib import Path

from jaxkv import models
from jaxkv.models.training.pretrain import pretrain
from jaxkv.models.training.recipes import PRESETS

folder, steps = Path(tempfile.mkdtemp()), runtime.size(800, 400)
tokens = write(chain, folder / "data")


def train(sinks, seed):
    recipe = dataclasses.replace(PRESETS["backcopy"], sink_variant=sinks, seed=seed, steps=steps)
    run = folder / f"{sinks}-{seed}"
    return models.load(pretrain(recipe, tokens, run, tell=lambda line: None))


# %%
SEEDS, VARIANTS = runtime.size((1, 2, 0), (1,)), ("none", "token")
trained = [{sinks: train(sinks, seed) for sinks in VARIANTS} for seed in SEEDS]
print(f"{len(trained) * len(VARIANTS)} models, {steps} steps each")

# %% [markdown]
# The next cells measure the loss of held-out letters by their position in a sample, and the mean
# attention of each idle letter to the first token.

# %%
import numpy as np

from jaxkv.colab import letters
from jaxkv.models.tools import palette, pictures


def of_each(measure, *arguments):
    """A measurement of every model, by seed and variant."""
    return [{name: measure(llm, *arguments) for name, llm in pair.items()} for pair in trained]


by_position = of_each(letters.losses_by_position, tokens)
on_first = of_each(letters.attention_on_first, tokens, chain.triggers)
floor = chain.floor(chain.letters(200_000, 99))

# %%
figure, (left, right) = pictures.begin(6.6, 3.6, columns=2)
for axes, by_seed in ((left, by_position), (right, on_first)):
    for number, variants in enumerate(by_seed):
        for name, line in variants.items():
            label = name if axes is left and number == 0 else None
            axes.plot(range(1, len(line) + 1), line, color=palette.VARIANTS[name], label=label)
left.axhline(floor, color=pictures.INK, lw=0.8, ls="--", label="lower bound")
left.set(xlabel="position in a sample", ylabel="loss (nats per letter)")
right.set(xlabel="idle letters, sorted", ylabel="attention on the first token", ylim=(0, 1))
pictures.legend(figure, 3)
caption = f"held-out letters; one line per seed, {len(SEEDS)} in all"
runtime.picture(figure, "What a sink token changes", caption)

# %% [markdown]
# **What to see.** The left panel shows the loss by position in a sample. The sink token replaces the
# first letter of a sample. So this variant must predict the second letter without context. It must
# also predict the third letter without context if that is a copy of the missing letter. From the
# third position on, both variants have the same task:

# %%
late = [{name: loss[2:].mean() for name, loss in variants.items()} for variants in by_position]
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
# those of the first seed. Of 200 stretches of text, the maps show the one in which the sink gets
# most attention. A trigger (with a dot) attends to the letter before it, because the next letter is
# a copy of that letter. An idle letter attends to itself, which adds no information, or to the sink
# if the model has one.

# %%
texts = {name: letters.held_out(llm, tokens, 200, 15) for name, llm in trained[0].items()}
maps = {name: letters.attention(llm, texts[name]) for name, llm in trained[0].items()}
shown = maps["token"][:, :, 0].mean(axis=1).argmax()

# %% tags=["picture"]
figure, panels = pictures.begin(6.6, 4.2, columns=2)
for axes, (name, weights) in zip(panels, maps.items(), strict=True):
    image = axes.imshow(np.tril(weights[shown]), vmin=0, vmax=1, cmap="Blues")
    ids = texts[name][shown]
    labels = [names[i] if i < len(names) else "sink" for i in ids]
    axes.set_xticks(range(len(ids)), labels, fontsize=8)
    axes.set_yticks(range(len(ids)), labels, fontsize=8)
    axes.tick_params(length=0)
    axes.set(title=name, xlabel="key", ylabel="query")
    axes.grid(False)
figure.colorbar(image, ax=list(panels), orientation="horizontal", shrink=0.6, label="attention")
runtime.picture(figure, "Attention maps", "15 held-out letters; a dot marks a trigger", colours=256)

# %% [markdown]
# ## Streaming with one sink
#
# All models now read a text that is much longer than a sample, with caches of 24 tokens. The caches
# store the newest tokens only, or one, two or four of the first tokens and fewer of the newest.

# %%
CACHES = {"0 + 24": "window:window=24"}
CACHES |= {f"{n} + {24 - n}": f"streaming:sinks={n},window={24 - n}" for n in (1, 2, 4)}
count = runtime.size(20_000, 4_000)


def loss(llm, policy):
    (ids,) = letters.held_out(llm, tokens, 1, count)
    front = len(llm.tokenizer.front)
    return float(np.concatenate([*models.losses(llm, ids, policy)])[front:].mean())


losses = of_each(lambda llm: {name: loss(llm, policy) for name, policy in CACHES.items()})

# %%
figure, axes = pictures.begin(6.0, 3.4)
for seed, variants in enumerate(losses):
    for shift, (name, by_cache) in zip((-0.08, 0.08), variants.items(), strict=True):
        at = np.arange(len(CACHES)) + shift
        label, colour = (None if seed else name), palette.VARIANTS[name]
        axes.plot(at, [*by_cache.values()], "o", ms=5, color=colour, label=label)
axes.axhline(floor, color=pictures.INK, lw=0.8, ls="--", label="lower bound")
axes.set_xticks(range(len(CACHES)), CACHES)
axes.set(xlabel="first + newest tokens in the cache", ylabel="loss (nats per letter)")
pictures.legend(figure, 3)
caption = (
    f"{count:,} held-out letters, {count // 48} times the length of a sample; one point per seed"
)
runtime.picture(figure, "The loss of a long text by its cache", caption)

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
# jaxkv pretrain --preset tiny --data tokens --out run --set sink_variant=token
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


attention = of_each(letters.attention_by_role, tokens, chain.triggers)


def in_every_seed(by_seed, holds):
    return all(holds(*variants.values()) for variants in by_seed)


runtime.verify(
    "",
    always={
        "with a sink token, the first two predictions have a higher loss":
            in_every_seed(by_position,
                          lambda none, token: bool((token > none + 0.3)[:2].all())),
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
