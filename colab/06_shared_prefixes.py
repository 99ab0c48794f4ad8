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
# block on:

# %%
from jaxkv.serve.prefix import BlockHasher, root_hash

ids = runtime.passage(llm, 64)
second = ids[:40] + ids[20:44]
hasher, root = BlockHasher(16), root_hash(model=llm.name)
hashes = [hasher.hash_prompt(prompt, root).hashes for prompt in (ids, second)]
for of_prompt in hashes:
    print(*(block_hash.hex()[:6] for block_hash in of_prompt))

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
from jaxkv.colab import conversations

concurrent = (4, 16, 64)
hits = conversations.measure_hit_rates(concurrent, runtime.size(1_000, 200), seeds=3)
conversations.draw_hit_rates(hits, concurrent)

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
users, turns = runtime.size((4, 5), (3, 3))
said = conversations.make_turns(llm, users, turns)  # new tokens by turn and user


def talk(engine):
    prompts, answers = [()] * users, []
    for new in said:
        prompts = [(*prompt, *new_tokens) for prompt, new_tokens in zip(prompts, new, strict=True)]
        last = answer(engine, [Request(prompt, conversations.ANSWER_TOKENS) for prompt in prompts])
        prompts = [(*prompt, *reply.tokens) for prompt, reply in zip(prompts, last, strict=True)]
        answers += last
    return answers


# %%
NUM_BLOCKS = {"full": 32, "streaming:sinks=4,window=124": 16}  # pages, and states of equal bytes
served, longest = {}, conversations.max_length(said)
for policy, num_blocks in NUM_BLOCKS.items():
    recomputing, caching = (engine_of(policy, number, longest) for number in (None, num_blocks))
    served[policy] = conversations.serve_both(recomputing, caching, talk, runtime.size(2, 1))
runtime.TextBox(conversations.reuse_table(served))

# %% tags=["picture"]
caption = (
    f"from a free slot to the first token; medians of {users} users, range over the rounds;\n"
    f"{llm.name}, {runtime.device()}"
)
conversations.draw_first_token_by_turn(served, turns, caption)

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
from jaxkv.evals.prefix_caching import traces

trace = traces.read(conversations.TRACE)
total = sum(request.tokens for request in trace.requests)
print(
    f"{len(trace.requests)} requests, {total:,} tokens, {total / len(trace.requests):,.0f} on average"
)

# %% [markdown]
# The next cell counts the blocks that an index finds if it has room for a part of them and evicts
# the least recently used block.

# %%
shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
hit_rates = conversations.hit_rate_by_capacity(trace, shares)
conversations.draw_capacity(
    hit_rates, shares, f"the first {len(trace.requests)} requests of a trace, one after another"
)

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
import numpy as np

first_hashes, second_hashes = hashes
at_16, by_formula = (hits[name][1]["median"] for name in ("rekey", "formula"))
pairs = [(pair[conversations.RECOMPUTED], pair[conversations.CACHED]) for pair in served.values()]
(full, full_cached), (streaming, streaming_cached) = (
    [np.median(run.first.reshape(-1, turns, users), axis=(0, 2)) for run in pair] for pair in pairs
)
growing, evicting = (
    (b.cached / b.prompts).reshape(turns, users).mean(axis=1).tolist() for _, b in pairs
)
first, *later = outcomes
runtime.verify(
    "" if llm.name.startswith("SmolLM2") else "another model",
    always={
        "block hashes differ where the prompts do": first_hashes[:2] == second_hashes[:2]
        and not {*first_hashes[2:]} & {*second_hashes[2:]},
        "a second hash for the prompt hits almost always": hits["alias"][1]["median"] > 95,
        "full blocks never hit for a short prompt": not any(x["max"] for x in hits["full"]),
        "the hit rate of a changing hash is that of the formula": abs(at_16 - by_formula) < 2.5,
        "only the first of several endings computes the text": first.cached_tokens == 0
        and all(outcome.computed_tokens < 128 for outcome in later),
        "few blocks of the recorded requests are found": hit_rates[-1] < 20,
        "prefix caching does not change an answer": all(a.tokens == b.tokens for a, b in pairs),
        "cached tokens are not computed": all(
            (b.read + b.cached == a.read).all() and b.cached.any() for a, b in pairs
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
