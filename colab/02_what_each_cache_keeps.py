# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/02_what_each_cache_keeps.ipynb)
#
# # What each cache keeps
#
# One text read under every policy, and what is left of it in memory, token by token: what the model
# would answer from. Runs on a CPU, a GPU or a TPU; the third cell says how many minutes.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from evals import runtime

runtime.begin("02_what_each_cache_keeps")

# %% [markdown]
# The model is the small one that comes with the package; any Llama-family model from the Hub can take
# its place.

# %%
import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
ids = runtime.passage(llm, 480)
print(llm.tokenizer.decode(ids[:60]), "...")

# %% [markdown]
# ## Caches of one size
#
# Each of these keeps 126 or 128 of the 480 tokens, but `full`. Those of a stream (`window` to
# `balance-stream`) forget as they read and could go on for ever. Those of a prompt (`balance` to
# `pyramidkv`) keep all until it is complete, and are then thinned once.

# %%
from evals import kept
from evals.policies import SETTINGS

EVERYTHING = ("full", "magicpig", "topk", "topp", "oracle", "quest", "vattention")
bounded = {name: text for name, text in SETTINGS.items() if name not in EVERYTHING}
found = kept.read(llm, ids, {"full": "full"} | bounded)
for name, setting in bounded.items():
    print(f"{name:15} {setting}")

# %% [markdown]
# A strip is the text from its beginning on the left to its end on the right. White is forgotten. Blue
# is held, the mean over all layers and kv heads: pale where few heads hold a token, or dark where it
# counts for several, since a policy may let a token stand for others that are gone.

# %% tags=["picture"]
kept.draw(
    found, "480 tokens of a novel; the mean weight of a token in six layers of three kv heads"
)

# %% [markdown]
# - `window` has the end and nothing else, `streaming` four tokens of the beginning besides.
# - `reservoir` gives up half of its window for tokens drawn at random from all that has left it, other
#   ones in each head. `stratified` draws one from each stretch, and `balance-stream` halves blocks so
#   that those kept stand for those gone; it holds more of what is recent.
# - `h2o`, `snapkv` and `pyramidkv` choose by attention: by what all queries looked at so far, or by what
#   the last queries of the prompt look at. `pyramidkv` gives early layers more.
# - `uniform` and `balance` keep a quarter of what lies between the ends, each for four.
#
# ## In the text
#
# The same four times, word by word; the darker the ground, the more weight.

# %%
kept.shade(llm, ids, found, ["streaming", "stratified", "balance", "snapkv"])

# %% [markdown]
# ## What it would answer from
#
# The passage names a doctor and says what is engraved on his stick. Once all of it is read, in how
# many of the heads are these words still there?

# %%
NAMES = {"the engraving": "To James Mortimer", "its date": "1884", "the end": "this mark of"}
places = {name: kept.find(llm, ids, words) for name, words in NAMES.items()}
runtime.Text(kept.table(found, places))

# %% [markdown]
# To be held is not yet to be used. A token that few heads hold may be of no use to them, and a model
# this small uses little of what is far away.
# [How often something said long ago is found again](https://github.com/jaxkv/jaxkv/blob/main/evals/results/recall.png)
# was measured with models that were trained to look for it.
#
# ## Caches that keep everything
#
# `magicpig`, `topk`, `topp`, `oracle`, `quest` and `vattention` forget nothing, and choose for each
# query anew which of the keys it meets. So `kept` says that they hold all, and what they spare is
# reading: see [04_sampling_beats_topk](04_sampling_beats_topk.ipynb).

# %%
some = EVERYTHING[1 : runtime.size(7, 3)]
whole = kept.read(llm, ids, {name: SETTINGS[name] for name in some})
runtime.Text(kept.table(whole, places))

# %% [markdown]
# The cell below fails if anything above was not as it says.

# %%
import numpy as np

weights, size = {name: held.weights for name, held in found.items()}, len(ids)
assert (weights["full"] == 1).all() and all((held.weights == 1).all() for held in whole.values())
assert (np.flatnonzero(weights["window"][0, 0]) == np.arange(size - 128, size)).all()
four = [0, 1, 2, 3, *range(size - 124, size)]
assert (np.flatnonzero(weights["streaming"][-1, -1]) == four).all()
for name in ("reservoir", "stratified", "balance-stream"):
    assert (weights[name][:, :, -60:] == 1).all() and (weights[name][:, :, :4] == 1).all()
    assert ((weights[name] > 0).sum(axis=2) <= 128).all()
assert ((weights["h2o"] > 0).sum(axis=2) == 128).all()
assert np.allclose(weights["uniform"].sum(axis=2), size, rtol=0.1)
assert all(abs(found[name].state_bytes / found["window"].state_bytes - 1) < 0.1
           for name in ("streaming", "h2o", "reservoir", "stratified", "balance-stream"))  # fmt: skip
print("as it should be")
