# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/06_shared_prefixes.ipynb)
#
# # Shared prefixes
#
# A chat client sends the whole conversation again with every turn. Prefix caching computes the
# common beginning of prompts once and reuses it. It works for growing caches and for evicting
# caches. The result is bit-identical to recomputing. The third cell lists the devices on which this
# notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("06_shared_prefixes")

# %% [markdown]
# The default model is small and comes with the package. The Hub id of any Llama-family model can
# replace it.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()

# %% [markdown]
# ## How a prefix is identified
#
# A prompt is cut into blocks. The hash of a block is computed from its tokens and the hash of the
# block before it. So blocks with equal hashes have equal tokens before them too, and one look-up per
# block finds the longest cached prefix of a prompt. The two prompts below differ from their third
# block on:

# %%
from jaxkv.colab import conversations

ids = runtime.passage(llm, 64)
other = ids[:40] + ids[20:44]
for prompt in (ids, other):
    print(*conversations.block_hashes(prompt))

# %% [markdown]
# ## A block that is only partly full
#
# The hit rate depends on the last block of a prompt, which is usually incomplete. The report that
# this library follows sent one prompt of 15 tokens many times and measured 8 hits in 100 requests.
# It explained the misses by differing answers. The actual cause is the hash. The next cell measures
# three ways to handle a prompt that is shorter than a block:
#
# - `rekey`: the hash of the block changes when the first generated token is written into the block.
#   Only requests that are admitted together can then share the block. A formula predicts this hit
#   rate.
# - `alias`: the block keeps a second hash for the prompt. Almost every request hits.
# - `full`: only full blocks have hashes. No request hits, because the prompt fills no block.

# %%
concurrent = (4, 16, 64)
hits = conversations.measure_hit_rates(concurrent, runtime.size(1_000, 200), seeds=3)
conversations.draw_hit_rates(hits, concurrent)

# %% [markdown]
# ## Conversations through the engine
#
# Several users talk to the engine in turns. All conversations begin with the same 256 tokens of
# instructions, and each turn sends all earlier turns and answers again. The engine processes
# prompts in chunks of 64 tokens and decodes four sequences at a time.
#
# A growing cache shares *pages*: all prompts with the same beginning use one copy of the keys and
# values of a chunk. An evicting cache has already evicted tokens at the end of a prefix, so pages
# are not enough. The engine stores the whole *state* of such a cache at a few positions and restores
# it from there. In both cases, the generated tokens must equal those without prefix caching.

# %%
from functools import partial

from jaxkv.engine import PrefixConfig

users, turns = runtime.size((6, 6), (3, 3))
said = conversations.make_turns(llm, users, turns)
ENTRIES = {"full": 64, "streaming:sinks=4,window=124": 32}  # pages and states of equal bytes

# %%
served = {
    policy: conversations.serve_both(
        llm, policy, partial(conversations.run_conversations, said=said),
        conversations.max_length(said), PrefixConfig(num_blocks=entries), chunk=64,
        rounds=runtime.size(3, 1),
    )
    for policy, entries in ENTRIES.items()
}  # fmt: skip
runtime.TextBox(conversations.reuse_table(served))

# %% tags=["picture"]
caption = (
    f"from a free slot to the first token; medians of {users} users, range over the rounds; "
    f"{runtime.device()}"
)
conversations.draw_first_token_by_turn(served, turns, caption)

# %% [markdown]
# **What to see.** Without prefix caching, time to first token grows with the conversation. With
# prefix caching it depends only on the number of new tokens, as long as the prefixes fit in memory.
# Both caches have equal memory. In the last turn, the growing cache has too few pages, and its time
# to first token jumps. The state of an evicting cache has constant size.
#
# ## Recorded requests
#
# Real conversations are less regular. The next cell loads a trace: the first requests of one hour of
# a chat service ([Mooncake](https://github.com/kvcache-ai/Mooncake), published under Apache-2.0).
# The trace has no texts. It has one id per 512 tokens. Two ids are equal if the texts are equal up to
# the end of these 512 tokens.

# %%
from jaxkv.evals.prefix_caching import engine, traces

trace = traces.read(conversations.TRACE)
total = sum(one.tokens for one in trace.requests)
print(
    f"{len(trace.requests)} requests, {total:,} tokens, {total / len(trace.requests):,.0f} on average"
)

# %% [markdown]
# The next cell counts the blocks that an index finds if it has room for a part of them and evicts
# the least recently used block.

# %%
shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
found = conversations.hit_rate_by_capacity(trace, shares)
conversations.draw_capacity(
    found, shares, f"the first {len(trace.requests)} requests of a trace, one after another"
)

# %% [markdown]
# **What to see.** Most prompts are new. Even with room for all blocks, few blocks are found so early
# in the hour. Over [the whole
# hour](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md#hash-table-prefix-caching-lin-2024),
# more than a third of the blocks are found.
#
# The next cell sends the requests through the engine. Their texts are generated from the ids. All
# lengths are divided by sixteen, because the model is small:

# %%
load = engine.mooncake(llm, conversations.TRACE, runtime.size(400, 40), divide=16)
longest = max(len(request.tokens) + request.max_new_tokens for request in load.requests)
POLICY = "streaming:sinks=4,window=124"
recorded = conversations.serve_both(
    llm, POLICY, partial(conversations.answer, requests=load.requests), longest,
    PrefixConfig(num_blocks=runtime.size(512, 128)), load.chunk, rounds=1,
)  # fmt: skip
runtime.TextBox(conversations.reuse_table({POLICY: recorded}))

# %%
caption = f"from a free slot to the first token, one dot per request; {runtime.device()}"
conversations.draw_first_token_by_length(recorded, caption)

# %% [markdown]
# **What to see.** The time to first token depends on the number of new tokens and on the other three
# sequences at that moment. It is shorter on average for the few requests with at least half of the
# prompt cached (blue). For most requests little is cached, so little time is saved. Agents send all
# earlier steps with every step, so most of their prompt tokens are cached. There, the states of an
# evicting cache save about as many tokens as pages do, in a small part of the memory:
# [plot](https://github.com/jaxkv/jaxkv/blob/main/evals/results/agents.png).
#
# ## Serving
#
# The same engine runs behind an HTTP server for OpenAI clients:
#
# ```bash
# jaxkv serve --policy streaming:sinks=4,window=252 --prefix-memory 1GiB
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
# Each API key and each `cache_salt` has its own prefix cache, because time to first token would
# otherwise reveal the prompts of other users.
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
import numpy as np

same, other_hashes = (conversations.block_hashes(prompt) for prompt in (ids, other))
at_16, by_formula = (hits[name][1]["median"] for name in ("rekey", "formula"))
pairs = [
    (pair[conversations.RECOMPUTED], pair[conversations.CACHED])
    for pair in (*served.values(), recorded)
]
last = [np.median(one.first[:, -users:]) for pair in pairs[:2] for one in pair]
by_turn = [(b.found / b.prompts).reshape(turns, users).mean(axis=1) for _, b in pairs[:2]]
growing, evicting = by_turn
recomputed, cached = pairs[2]
much = cached.found > 0.5 * cached.prompts
sooner = cached.first[:, much].sum() / max(recomputed.first[:, much].sum(), 1e-9)
runtime.verify(
    MODEL,
    always={
        "block hashes differ where the prompts do": same[:2] == other_hashes[:2]
        and not {*same[2:]} & {*other_hashes[2:]},
        "a second hash for the prompt hits almost always": hits["alias"][1]["median"] > 95,
        "full blocks never hit for a short prompt": not any(x["max"] for x in hits["full"]),
        "the hit rate of a changing hash is that of the formula": abs(at_16 - by_formula) < 2.5,
        "few blocks of the recorded requests are found": found[-1] < 20,
        "prefix caching does not change an answer": all(a.tokens == b.tokens for a, b in pairs),
        "cached tokens are not computed": all(
            (b.read + b.found == a.read).all() and b.found.any() for a, b in pairs
        ),
    },
    ours={
        "more than half of the conversations' tokens is cached": all(
            b.found.sum() > 0.5 * b.prompts.sum() for _, b in pairs[:2]
        ),
        "the growing cache runs out of pages in the last turn": runtime.SMOKE
        or bool(growing[-1] < 0.8 * growing[-2]),
        "the evicting cache does not": runtime.SMOKE or bool(evicting[-1] > 0.95 * evicting[-2]),
        "some prompts are more than half cached": runtime.SMOKE or bool(much.any()),
    },
    times={
        "the last turn has a lower time to first token": last[1] < 0.8 * last[0]
        and last[3] < 0.8 * last[2],
        "so do prompts that are more than half cached": runtime.SMOKE or bool(sooner < 0.8),
    },
)
