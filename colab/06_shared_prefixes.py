# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/06_shared_prefixes.ipynb)
#
# # Shared prefixes
#
# A chat sends all that was said with every turn. What prompts have in common is read once, under
# caches that grow and, bit for bit, under evicting caches. The third cell says where it has been
# run, and how long it took.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("06_shared_prefixes")

# %% [markdown]
# The model is a small one of our own that comes with the package; the Hub id of any Llama-family model
# can take its place.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()

# %% [markdown]
# ## What a prefix is known by
#
# A prompt is cut into blocks. The key of a block is a hash of the key before it and of its own tokens,
# so equal keys mean that all before them was equal too, and one look-up a block finds how far two
# prompts are the same. These two part in their third block:

# %%
from jaxkv.colab import conversations

ids = runtime.passage(llm, 64)
other = ids[:40] + ids[20:44]
for prompt in (ids, other):
    print(*conversations.keys(prompt))

# %% [markdown]
# ## A block that is not yet full
#
# How much is found depends on what becomes of the last block of a prompt. The report that this library
# follows sent one prompt of 15 tokens again and again, found it 8 times of 100, and put that down to
# answers that differ. It is the key that changes: a prompt shorter than a block loses its key with the
# first token that is written after it (`rekey`), so only requests that are admitted together find
# each other, which a formula can tell. A block that keeps a key of its own for the prompt (`alias`) is
# found almost always; full blocks alone (`full`) never, for such a prompt fills none.

# %%
slots = (4, 16, 64)
hits = conversations.hits(slots, runtime.size(1_000, 200), seeds=3)
conversations.draw_hits(hits, slots)

# %% [markdown]
# ## Conversations through the engine
#
# Users take turns. All begin with the same 256 tokens of instructions, and each turn sends everything
# before it again, the answers too. The engine reads prompts in chunks of 64 tokens and answers four at
# a time.
#
# A cache that grows can share *pages*: a chunk's keys and values serve all that begin alike. A cache
# that evicts has dropped tokens by the end of a prefix, so a page of it is of no use; its whole
# *state* is cached at a few places, and taken up there. Either way what follows must be what it would
# have been.

# %%
from functools import partial

from jaxkv.engine import PrefixConfig

users, turns = runtime.size((6, 6), (3, 3))
said = conversations.say(llm, users, turns)
SLOTS = {"full": 64, "streaming:sinks=4,window=124": 32}  # as many bytes of pages as of states
served = {
    policy: conversations.serve(
        llm, policy, partial(conversations.converse, said=said), conversations.room(said),
        PrefixConfig(slots), chunk=64, rounds=runtime.size(3, 1),
    )
    for policy, slots in SLOTS.items()
}  # fmt: skip
runtime.Text(conversations.table(served))

# %% tags=["picture"]
caption = (
    f"from a free slot to the first token; medians of {users} users, least to most of the rounds; "
    f"{runtime.device()}"
)
conversations.draw_first(served, turns, caption)

# %% [markdown]
# Where everything is recomputed, a turn takes longer the more was said; with prefix caching it costs what
# is new in it, as long as there is room for them. In as much memory the cache that grows runs out of
# pages in the last turn, and its time jumps. A state of an evicting cache stays as small as it is.
#
# ## Recorded requests
#
# People do not talk as tidily as that. These are the first requests that a chat service was sent in
# an hour ([Mooncake](https://github.com/kvcache-ai/Mooncake), published under Apache-2.0). Of their
# texts only ids are known, one for every 512 tokens, equal where all before was equal.

# %%
from jaxkv.evals.prefix_caching import engine, traces

trace = traces.read(conversations.TRACE)
total = sum(one.tokens for one in trace.requests)
print(
    f"{len(trace.requests)} requests, {total:,} tokens, {total / len(trace.requests):,.0f} in the mean"
)

# %% [markdown]
# How many blocks does an index find that has room for some of them, and gives up those that were not
# asked for longest?

# %%
shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
found = conversations.by_capacity(trace, shares)
conversations.draw_capacity(
    found, shares, f"the first {len(trace.requests)} requests of a trace, one after another"
)

# %% [markdown]
# Most prompts are new: even with room for all of them few blocks are found so early in the hour.
# ([The whole hour](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md#hash-table-prefix-caching-lin-2024)
# has a third of them.) Now through the engine, with texts made up for the ids and every length divided
# by sixteen, for the model is small:

# %%
load = engine.mooncake(llm, conversations.TRACE, runtime.size(400, 40), divide=16)
longest = max(len(request.tokens) + request.max_new_tokens for request in load.requests)
POLICY = "streaming:sinks=4,window=124"
recorded = conversations.serve(
    llm, POLICY, partial(conversations.answer, requests=load.requests), longest,
    PrefixConfig(runtime.size(512, 128)), load.chunk, rounds=1,
)  # fmt: skip
runtime.Text(conversations.table({POLICY: recorded}))

# %%
caption = f"from a free slot to the first token, one dot a request; {runtime.device()}"
conversations.draw_each(recorded, caption)

# %% [markdown]
# How long a request takes follows from what is new in it, and from what the other three slots are at
# just then. The few of which half was there (blue) are answered sooner, taken together; for most there
# is little to find, so there is little to gain. On recorded agents,
# which send all that was done before with every step, nearly everything is found, and states of a cache
# that evict save about as much as pages do in a small part of their memory:
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
# The next cell checks these results and fails if one of them does not hold.

# %%
import numpy as np

same, parted = (conversations.keys(prompt) for prompt in (ids, other))
at_16, by_formula = (hits[name][1]["median"] for name in ("rekey", "formula"))
pairs = [
    (pair[conversations.ANEW], pair[conversations.KEPT]) for pair in (*served.values(), recorded)
]
last = [np.median(one.first[:, -users:]) for pair in pairs[:2] for one in pair]
by_turn = [(b.found / b.prompts).reshape(turns, users).mean(axis=1) for _, b in pairs[:2]]
grown, forgot = by_turn
recomputed, kept = pairs[2]
much = kept.found > 0.5 * kept.prompts
sooner = kept.first[:, much].sum() / max(recomputed.first[:, much].sum(), 1e-9)
runtime.verify(
    MODEL,
    always={
        "keys part where prompts do": same[:2] == parted[:2] and not {*same[2:]} & {*parted[2:]},
        "a key of its own is found almost always": hits["alias"][1]["median"] > 95,
        "full blocks find nothing of a short prompt": not any(x["max"] for x in hits["full"]),
        "a changed key is found as the formula says": abs(at_16 - by_formula) < 2.5,
        "of the recorded requests little is found": found[-1] < 20,
        "answers are the same with prefixes kept": all(a.tokens == b.tokens for a, b in pairs),
        "what is found need not be read": all(
            (b.read + b.found == a.read).all() and b.found.any() for a, b in pairs
        ),
    },
    ours={
        "of conversations most is found": all(
            b.found.sum() > 0.5 * b.prompts.sum() for _, b in pairs[:2]
        ),
        "the cache that grows runs out of pages in the last turn": runtime.SMOKE
        or bool(grown[-1] < 0.8 * grown[-2]),
        "the cache that forgets has room": runtime.SMOKE or bool(forgot[-1] > 0.95 * forgot[-2]),
        "some prompts were found to a half": runtime.SMOKE or bool(much.any()),
    },
    times={
        "the last turn begins sooner": last[1] < 0.8 * last[0] and last[3] < 0.8 * last[2],
        "what was found to a half begins sooner": runtime.SMOKE or bool(sooner < 0.8),
    },
)
