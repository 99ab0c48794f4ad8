# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/06_shared_prefixes.ipynb)
#
# # Shared prefixes
#
# A chat sends all that was said with every turn. What prompts have in common is read once, under
# caches that grow and, bit for bit, under caches that forget. Runs on a CPU, a GPU or a TPU; the third
# cell says how many minutes.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from evals import runtime

runtime.begin("06_shared_prefixes")

# %%
import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()

# %% [markdown]
# ## What a prefix is known by
#
# A prompt is cut into blocks. The key of a block is a hash of the key before it and of its own tokens,
# so equal keys mean that all before them was equal too, and one look-up a block finds how far two
# prompts are the same. These two part in their third block:

# %%
from evals import conversations

ids = runtime.passage(llm, 64)
other = ids[:40] + ids[20:44]
for prompt in (ids, other):
    print(*conversations.keys(prompt))

# %% [markdown]
# ## An index alone
#
# How much is found depends on what is said of a block that is not yet full. The report that this
# library follows saw 8 % with one prompt for all, and put it down to answers that differ. It is the
# key that changes: a prompt shorter than a block loses its key with the first token that is written
# behind it (`rekey`), unless it keeps one of its own (`alias`). Full blocks alone find nothing of such
# a prompt (`full`).

# %%
shares = (0.2, 0.4, 0.6, 0.8, 1.0)
hits = conversations.hits(("alias", "rekey", "full"), shares, runtime.size(1_000, 200))
conversations.draw_hits(hits, shares)

# %% [markdown]
# ## Conversations through the engine
#
# Users take turns. All begin with the same 256 tokens of instructions, and each turn sends everything
# before it again. The engine reads prompts in chunks of 64 tokens and answers four at a time.

# %%
users, turns = runtime.size((6, 6), (3, 3))
asked = conversations.talk(llm, users, turns)
lengths = [len(request.tokens) for request in asked.requests]
print(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all")

# %% [markdown]
# A cache that grows can share *pages*: a chunk's keys and values serve all that begin alike. A cache
# that forgets has let go of something by the end of a prefix, so a page of it is of no use; its whole
# *state* is kept at a few places, and taken up there. Either way what follows must be what it would
# have been.

# %%
from jaxkv.engine import Prefixes

SLOTS = {"full": 64, "streaming:sinks=4,window=124": 32}  # as many bytes of pages as of states
served = {
    policy: tuple(conversations.serve(llm, policy, asked, kept) for kept in (None, Prefixes(slots)))
    for policy, slots in SLOTS.items()
}
runtime.Text(conversations.table(served))

# %% tags=["picture"]
conversations.draw_first(served, asked.turns)

# %% [markdown]
# Read anew, a turn takes longer the more was said. With prefixes kept it costs what is new in it.
#
# In as much memory the cache that forgets saves about as much here. A longer conversation wants more
# pages; a state stays as small as it is. On recorded agents, whose texts are far longer, states save
# nearly all that pages do in a small part of their memory:
# [picture](https://github.com/jaxkv/jaxkv/blob/main/evals/results/agents.png).
#
# ## Serving
#
# The same engine behind HTTP, for OpenAI's clients:
#
# ```bash
# jaxkv serve --policy streaming:sinks=4,window=252 --prefix-slots 256
# ```
#
# ```python
# from openai import OpenAI
#
# client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
# answer = client.completions.create(model="default", prompt="Once upon a time", max_tokens=40)
# print(answer.choices[0].text, answer.usage)
# ```
#
# Requests of different API keys, or of different `cache_salt`, share nothing: how soon an answer
# begins tells what was asked before.
#
# The cell below fails if anything above was not as it says.

# %%
same, parted = (conversations.keys(prompt) for prompt in (ids, other))
assert same[:2] == parted[:2] and not set(same[2:]) & set(parted[2:])
assert hits["alias"][-1] > 90 and hits["rekey"][-1] < 20 and not any(hits["full"])
for none, kept in served.values():
    assert none.tokens == kept.tokens and not none.found
    assert kept.read + kept.found == none.read and kept.found > 0.3 * none.read
print("as it should be")
