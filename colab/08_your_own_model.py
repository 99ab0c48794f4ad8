# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/08_your_own_model.ipynb)
#
# # Your own model
#
# Load a model of the Llama family, measure which cache policy suits your text, and serve the model
# with it. The third cell lists the devices on which this notebook has run and its run time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("08_your_own_model")

# %% [markdown]
# ## Load the model
#
# `models.load` takes a folder as published on the Hugging Face Hub, a Hub id, or a GGUF file. An
# empty field takes SmolLM2-135M-Instruct, or the small model of the package where no package index
# is reached.

# %%
from jaxkv import models

MODEL = ""  # @param {type: "string"}
name = MODEL or runtime.default_model()
llm = models.load(name)
context = llm.config.context
print(f"{llm.name}: {llm.config.layers} layers, trained on {context:,} tokens at a time")

# %% [markdown]
# ## Measure policies on your text
#
# Give the path of a text file that is like the texts that the model will read. An empty field takes
# the beginning of *The Hound of the Baskervilles*. A few thousand tokens are enough to see large
# differences.

# %%
from pathlib import Path

TEXT = ""  # @param {type: "string"}
count = runtime.size(2_000, 600)
ids = llm.tokenizer.encode(Path(TEXT).read_text("utf-8")) if TEXT else runtime.passage(llm, count)
ids = ids[:count]

# %% [markdown]
# With their default settings, all policies but `full` cache 256 tokens. `compare` reads the text once under each of them, and
# measures the loss of every token after the first. Lower is better.

# %%
from jaxkv.models.tools import compare

POLICIES = ["full", "window", "streaming", "reservoir", "stratified"]
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.no_progress)
results = [compare.result(llm, policy, scores[policy], block=100) for policy in POLICIES]
runtime.TextBox(compare.table(results))

# %% tags=["picture"]
runtime.shrink(compare.draw(results, context, "mean of 100 tokens per point", dpi=80))

# %% [markdown]
# **What to see.** SmolLM2 has learnt attention sinks. Under a window without sinks (orange), its
# loss jumps when the window evicts the first token. With four sinks (blue) it stays near the loss
# of full attention (grey).
#
# ## Choose
#
# Two policies differ by chance too. The next cell takes the bounded cache with the lowest loss, and
# prints how much more the others lose, with two standard errors over blocks of the text. If an
# interval contains 0, neither is better by more than noise, and the faster one would do as well.

# %%
import numpy as np

best = min(results[1:], key=lambda row: row["loss"])["policy"]
losses = {row["policy"]: np.array([b["loss"] for b in row["blocks"]]) for row in results}
for policy, of_blocks in losses.items():
    gap = of_blocks - losses[best]
    print(f"{gap.mean():+.3f} ± {2 * gap.std(ddof=1) / len(gap) ** 0.5:.3f}  {policy}")
print(f"\nchosen: {best}")

# %% [markdown]
# ## Serve
#
# `jaxkv serve` has OpenAI's API. It prints a line when everything is compiled. In a terminal, leave
# out `--port 0`, which takes a free port.

# %%
import subprocess
import sys

words = ["serve", "--model", name, "--policy", best, "--max-batch", "2", "--port", "0"]
server = subprocess.Popen([sys.executable, "-m", "jaxkv", *words], stderr=-1, text=True)
started = next((line for line in server.stderr if "serving" in line), "")
url = started.partition(" on ")[2].partition(" ")[0]
print(started)

# %%
import json
from urllib.request import Request, urlopen

asked = {"prompt": "The old house stood", "max_tokens": 64, "seed": 1}
asked["model"] = json.load(urlopen(f"{url}/v1/models"))["data"][0]["id"]
sent = Request(f"{url}/v1/completions", json.dumps(asked).encode())
sent.add_header("Content-Type", "application/json")
answer = json.load(urlopen(sent))
print(asked["prompt"] + answer["choices"][0]["text"])

# %%
server.terminate()
server.stderr.read()
print("the server ended with", server.wait())

# %% [markdown]
# ## Next steps
#
# [The page of the server](https://github.com/jaxkv/jaxkv/blob/main/docs/serving.md) explains API
# keys, limits and metrics. [All policies](https://github.com/jaxkv/jaxkv/blob/main/docs/policies.md)
# says what each policy is for. The next cell checks these results and fails if one of them does not
# hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
full, window, streaming, *_ = results
is_smollm2 = llm.name.startswith("SmolLM2") and not TEXT
runtime.verify(
    "" if is_smollm2 else "another model or text",
    always={
        "every bounded cache takes less memory than full attention": all(
            row["state_bytes"] < full["state_bytes"] for row in results[1:]
        ),
        "below their capacity all policies have the same loss": np.ptp(
            [of_blocks[0] for of_blocks in losses.values()]
        )
        < 1e-3,
        "the chosen policy has the lowest loss of the bounded ones": all(
            of_blocks.mean() >= losses[best].mean() - 1e-3
            for policy, of_blocks in losses.items()
            if policy != "full"
        ),
        "the server answered": answer["usage"]["completion_tokens"] > 0,
        "and ended": server.returncode == 0,
    },
    default_only={
        "without sinks the loss jumps": window["loss"] > streaming["loss"] + 0.2,
        "with sinks it is near that of full attention": streaming["loss"] < full["loss"] + 0.2,
    },
)
