# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/05_shared_prefixes.ipynb)
#
# # Shared prefixes
#
# A chat client sends the whole conversation again with every turn. Prefix caching computes the
# common beginning of prompts once and reuses it. It works for growing caches and for evicting
# caches. The result is bit-identical to recomputing. The third cell lists the devices on which this
# notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[serve,train] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("05_shared_prefixes")

# %% [markdown]
# An empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package
# index is reached. Any Llama-family model can replace it: a Hub id, a folder or a GGUF file. The
# statements about times and memory apply to SmolLM2.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL or runtime.default_model())
print(f"{llm.name}: {llm.config.layers} layers, trained on {llm.config.context:,} tokens at a time")

# %% [markdown]
# ## How a prefix is identified
#
# A prompt is cut into blocks. The hash of a block is computed from its tokens and the hash of the
# block before it. So blocks with equal hashes have equal tokens before them too, and one look-up per
# block finds the longest cached prefix of a prompt. The two prompts below differ from their third
# block on, although the same tokens follow later:

# %%
from hashlib import sha256


def block_hashes(tokens, size=16):
    hashes, before = [], b""
    for start in range(0, len(tokens) - size + 1, size):
        before = sha256(before + str(tokens[start : start + size]).encode()).digest()
        hashes.append(before.hex()[:6])
    return hashes


ids = runtime.passage(llm, 64)
hashes = [block_hashes(prompt) for prompt in (ids, ids[:40] + ids[20:24] + ids[44:])]
print(*hashes, sep="\n")

# %% [markdown]
# ## One text, several endings
#
# `make_engine` makes an engine that answers requests from its queue. `PrefixConfig` gives it a
# prefix cache. The engine computes prompts in chunks of 64 tokens and decodes at most four sequences
# at a time:

# %%
from jaxkv.models.generation.serving import make_engine
from jaxkv.serve.engine import PrefixConfig, Request, answer


def engine_of(policy, num_blocks, max_len):
    prefixes = PrefixConfig(num_blocks=num_blocks) if num_blocks else None
    return make_engine(llm, policy, max_batch=4, max_len=max_len, chunk=64, prefix_cache=prefixes)


# %% [markdown]
# The next cell sends the same text three times, each time with another ending. Only the first request
# computes the text:

# %%
text = runtime.passage(llm, runtime.size(1_500, 500))
ENDINGS = "Sherlock Holmes said that", "The stick was made of", "The dog looked like"
engine, outcomes = engine_of("full", 32, len(text) + 64), []
answer(engine, [Request((1, 2, 3), 2)])  # compiles
for ending in ENDINGS:
    prompt = (*text, *llm.tokenizer.encode(f"\n\n{ending}", bos=False))
    (reply,) = answer(engine, [Request(prompt, 16)])
    outcomes.append(done := reply.outcome)
    words = ending + llm.tokenizer.decode(reply.tokens)
    print(f"{done.computed_tokens:5} tokens in {done.first_token_seconds:.2f} s: {words!r}")

# %% [markdown]
# ## Conversations
#
# Several users talk to the engine in turns. All conversations begin with the same 256 tokens, as
# if these were instructions. Each turn sends all earlier turns and answers again. The texts are
# parts of a novel: their content does not change the time.
#
# A growing cache shares *pages*: all prompts with the same beginning use one copy of the keys and
# values of a chunk. An evicting cache has already evicted tokens at the end of a prefix, so pages
# are not enough. The engine stores the whole *state* of such a cache at a few positions and restores
# it from there. In both cases, the generated tokens must equal those without prefix caching.

# %%
import numpy as np

from jaxkv.colab import conversations

users, turns = runtime.size((4, 5), (3, 3))
novel, rng = runtime.passage(llm, 12_000), np.random.default_rng(0)


def part():
    start, count = rng.integers(256, len(novel) - 160), rng.integers(80, 160)
    return tuple(novel[start : start + count])


said = [[part() for _ in range(users)] for _ in range(turns)]  # new tokens by turn and user
longest = 256 + max(sum(map(len, parts)) for parts in zip(*said, strict=True)) + 16 * turns


# %%
def talk(engine):
    prompts, replies = [tuple(novel[:256])] * users, []
    for new_tokens in said:
        prompts = [prompt + new for prompt, new in zip(prompts, new_tokens, strict=True)]
        replies.append(answer(engine, [Request(prompt, 16) for prompt in prompts]))
        prompts = [(*p, *reply.tokens) for p, reply in zip(prompts, replies[-1], strict=True)]
    return replies


# %%
NUM_BLOCKS = {"full": 32, "streaming:sinks=4,window=124": 16}  # pages, and states of equal bytes
RECOMPUTED, CACHED = "recomputed", "prefix caching"
served = {}
for policy, num_blocks in NUM_BLOCKS.items():
    engines = {
        RECOMPUTED: engine_of(policy, None, longest),
        CACHED: engine_of(policy, num_blocks, longest),
    }
    served[policy] = conversations.serve(engines, talk, runtime.size(2, 1))
    kept = served[policy][CACHED]
    print(f"{policy.split(':')[0]}: {kept.cached.sum():,} of {kept.prompts.sum():,} prompt tokens "
          f"cached, in {kept.bytes / 2**20:.1f} MiB")  # fmt: skip

# %% tags=["picture"]
from jaxkv.models.tools import palette, pictures

figure, axes = pictures.begin(6.5, 4.0)
for policy, pair in served.items():
    name = policy.split(":")[0]
    for label, line in ((RECOMPUTED, "dashed"), (CACHED, "solid")):
        times, colour = np.median(pair[label].milliseconds, axis=2), palette.COLOURS[name]
        at, look = range(1, turns + 1), {"marker": "o", "ms": 3, "ls": line, "color": colour}
        axes.plot(at, np.median(times, axis=0), label=f"{name}, {label}", **look)
        axes.fill_between(at, times.min(axis=0), times.max(axis=0), alpha=0.2, lw=0, color=colour)
axes.set(xlabel="turn of a conversation", ylabel="time to the first token (ms)", ylim=(0, None))
pictures.legend(figure, 2)
caption = f"medians of {users} users, range over the rounds; {llm.name}, {runtime.device()}"
runtime.picture(figure, "Time to the first token, turn by turn", caption)

# %% [markdown]
# **What to see.** Without prefix caching, time to first token grows with the conversation. With
# prefix caching it depends only on the number of new tokens, as long as the prefixes fit in memory.
# Both prefix caches have equal memory, which was chosen for this picture: in the last turn, the
# growing cache has too few pages, and its time to first token jumps. A state of the evicting cache
# has the same size in every turn.
#
# ## Recorded requests
#
# Real conversations are less regular. The next cell loads a trace: the first requests of one hour of
# a chat service ([Mooncake](https://github.com/kvcache-ai/Mooncake), published under Apache-2.0).
# The trace has no texts. It has one id per 512 tokens. Two ids are equal if the texts are equal up to
# the end of these 512 tokens.

# %%
import json

requests = [json.loads(line) for line in conversations.TRACE.open()]
blocks_of = [request["hash_ids"] for request in requests]
total = sum(request["input_length"] for request in requests)
print(f"{len(requests)} requests, {total:,} tokens, {total / len(requests):,.0f} on average")

# %% [markdown]
# The next cell counts the blocks that an index finds if it has room for a part of them and evicts
# the least recently used block. A prompt makes its last block the oldest, because a block is useless
# without those before it.

# %%
from collections import OrderedDict
from itertools import takewhile


def hit_rate(capacity):
    """Percent of the blocks that an index with so many blocks finds."""
    index, hits = OrderedDict(), 0
    for blocks in blocks_of:
        hits += len([*takewhile(index.__contains__, blocks)])
        for block in reversed(blocks):
            index[block] = True
            index.move_to_end(block)
        while len(index) > capacity:
            index.popitem(last=False)
    return 100 * hits / sum(map(len, blocks_of))


# %%
shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
distinct = len({block for blocks in blocks_of for block in blocks})
hit_rates = [hit_rate(round(share * distinct)) for share in shares]
figure, axes = pictures.begin(6.0, 3.4)
axes.plot([100 * share for share in shares], hit_rates, "o-", ms=3, color=pictures.INK)
axes.set(xlabel="room in the index (% of the distinct blocks)", xlim=(0, None))
axes.set(ylabel="hit rate (% of the blocks)", ylim=(0, None))
caption = f"the first {len(requests)} requests of a trace, one after another; LRU eviction"
runtime.picture(figure, "Hit rate by the size of the index", caption)

# %% [markdown]
# **What to see.** Most prompts are new. Even with room for all blocks, few blocks are found so early
# in the hour. Over [the whole
# hour](https://github.com/jaxkv/jaxkv/blob/main/docs/results/prefix.md#an-hour-of-conversations),
# more than a third of the blocks are found.
#
# To send these millions of tokens through SmolLM2 would take hours on a CPU. With the small model of
# the package and an eighth of the lengths, [prefix caching answers somewhat more requests per
# second](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md#hash-table-prefix-caching-lin-2024).
# Agents send all earlier steps with every step, so most of their prompt tokens are cached. There, the
# states of an evicting cache save about as many tokens as pages do, in a small part of the memory:
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
first_hashes, second_hashes = hashes
pairs = [(pair[RECOMPUTED], pair[CACHED]) for pair in served.values()]
(full, full_cached), (streaming, streaming_cached) = (
    [np.median(run.milliseconds, axis=(0, 2)) for run in pair] for pair in pairs
)
growing, evicting = ((b.cached / b.prompts).mean(axis=1) for _, b in pairs)
first, *later = outcomes
runtime.verify(
    "" if llm.name.startswith("SmolLM2") else "another model",
    always={
        "block hashes differ from where the prompts do": first_hashes[:2] == second_hashes[:2]
        and not {*first_hashes[2:]} & {*second_hashes[2:]},
        "only the first of several endings computes the text": first.cached_tokens == 0
        and all(outcome.computed_tokens < 128 for outcome in later),
        "few blocks of the recorded requests are found": hit_rates[-1] < 20,
        "a smaller index finds fewer": hit_rates == sorted(hit_rates),
        "prefix caching does not change an answer": all(a.tokens == b.tokens for a, b in pairs),
        "cached tokens are not computed": all(
            (b.computed + b.cached == a.computed).all() and b.cached.any() for a, b in pairs
        ),
        "pages and states take the same memory, within 5 %": abs(
            pairs[0][1].bytes / pairs[1][1].bytes - 1
        )
        < 0.05,
    },
    default_only={
        "more than half of the conversations' tokens is cached": all(
            b.cached.sum() > 0.5 * b.prompts.sum() for _, b in pairs
        ),
        "the growing cache runs out of pages in the last turn": runtime.SMOKE
        or growing[-1] < 0.8 * growing[-2],
        "the evicting cache does not": runtime.SMOKE or evicting[-1] > 0.95 * evicting[-2],
    },
    times={
        "the later endings have a much lower time to first token": all(
            outcome.first_token_seconds < 0.5 * first.first_token_seconds for outcome in later
        ),
        "without prefix caching, time to first token grows with the conversation": min(
            full[-1] / full[0], streaming[-1] / streaming[0]
        )
        > 1.3,
        "with it, the time is lower while the prefixes fit in memory": full_cached[-2]
        < 0.8 * full[-2]
        and streaming_cached[-1] < 0.8 * streaming[-1],
    },
)
