# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/05_train_a_sink.ipynb)
#
# # Train a sink
#
# Two small models, alike but for a learnable sink token in front of every sample
# ([StreamingLLM](https://arxiv.org/abs/2309.17453), section 3.3): how they learn, what their heads
# look at, and what each needs of a cache. Runs on a CPU, a GPU or a TPU; the third cell says how many
# minutes.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from evals import runtime

runtime.begin("05_train_a_sink")

# %% [markdown]
# ## A head with nothing to do
#
# The models read letters (after [Guo et al.](https://arxiv.org/abs/2410.13835)). Each letter follows
# the one before it by chance, but for twenty *triggers*: behind a trigger comes the letter that stood
# before it. One head is enough for that, and at every letter that is no trigger this head has nothing
# to do. Triggers are marked by a dot:

# %%
from evals import backcopy

chain = backcopy.Chain(0)
some = chain.letters(60, seed=1)
print("".join(backcopy.LETTERS[i] + ("." if i in chain.triggers else "") for i in some))

# %% [markdown]
# ## Two arms
#
# `none` is plain softmax. `token` has one more token, which stands in front of every sample and is
# learnt like any other; it says nothing, so a head may look at it for free. `jaxkv pretrain` trains
# both by the same recipe, here a model of one layer with one head and samples of 48 letters.

# %%
import tempfile
from pathlib import Path

from evals import arms

folder, steps = Path(tempfile.mkdtemp()), runtime.size(800, 400)
trained, letters = arms.train(["none", "token"], steps, seed=1, folder=folder)
floor = chain.floor(chain.letters(200_000, 99))

# %%
shares = {name: arms.share_of_first(arm, letters) for name, arm in trained.items()}
arms.draw_learning(trained, floor, shares)

# %% [markdown]
# They learn equally well; a sink is no gain here while a sample is read whole. On the right is how
# much of its attention each idle letter gives to the first token of its sample, in the mean: with
# plain softmax none, with a sink token some letters much. (Another seed, other letters; over three
# seeds it was more or fewer of them, never none.)
#
# ## What they look at
#
# A row is a letter, a column what it looks at. A letter behind a trigger is known, so a trigger looks
# one back. An idle letter looks at itself, which tells it nothing new, or, where it was trained, at
# the sink.

# %% tags=["picture"]
arms.draw_maps(trained, letters, 24)

# %% [markdown]
# ## Streaming with one sink
#
# Both now read a text a hundred times as long as a sample, under caches of 24 tokens: the newest
# alone, or one, two or four of the first tokens beside fewer of the newest.

# %%
CACHES = ["window:window=24"] + [f"streaming:sinks={n},window={24 - n}" for n in (1, 2, 4)]
count = runtime.size(20_000, 4_000)
found = {
    name: arms.losses(arm, arms.held_back(arm, letters, count), CACHES)
    for name, arm in trained.items()
}
runtime.Text(arms.table(found))

# %%
arms.draw_losses(found, floor)

# %% [markdown]
# Where a sink token was trained the cache must keep it, and then one is enough: more of the first
# tokens bring nothing. The model with plain softmax does not care. It grew no sink, so it has none to
# lose. A window alone is safe for such a model, and whether a model is such cannot be seen from
# outside: keep the first tokens. More arms, more seeds and tries to make plain softmax grow a sink are
# in [CLAIMS.md](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md).
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
# The cell below fails if anything above was not as it says.

# %%
window, one, two, four = (found["token"][cache] for cache in CACHES)
assert shares["token"][0] > 0.2 and shares["none"][0] < 0.1
assert window > one + 0.02 and abs(one - four) < 0.2 * (window - one)
assert abs(found["none"][CACHES[0]] - found["none"][CACHES[1]]) < 0.01
print("as it should be")
