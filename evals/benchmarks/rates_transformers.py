"""The adapter of transformers for rates.py; one process per case.

Decoding is a greedy loop over the model's forward. transformers' `generate` does more per token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

from jaxkv.evals.benchmarks import rates_llama_cpp
from jaxkv.evals.lib.baseline import Baseline
from jaxkv.evals.lib.timing import timed


class TransformersWorker:
    """One model, eager or compiled, with one decoding per batch size."""

    def load(
        self, model: str, threads: int, prompts: Sequence[Sequence[int]], new: int, **_: Any
    ) -> dict[str, Any]:
        """Load a folder. prompts: to decode from; new: tokens of a static cache after a prompt."""
        import torch

        torch.set_num_threads(threads)
        self.baseline = self.stepper = Baseline.load(model)
        self.prompts, self.new = prompts, new
        self.decodings: dict[int, TorchDecoding] = {}
        return {
            "weight_bytes": sum(w.nbytes for w in self.baseline.model.parameters()),
            "cores": len(os.sched_getaffinity(0)),
        }

    def about(self) -> dict[str, str]:
        """Versions, and the implementation of attention."""
        import torch
        import transformers

        attention = self.baseline.model.config._attn_implementation
        return {"transformers": transformers.__version__, "torch": torch.__version__,
                "attention": attention}  # fmt: skip

    def compile(self, batches: Sequence[int], folder: str) -> dict[str, Any]:
        """Compile decoding of these batch sizes: the seconds, or the first line of the error.

        folder: place of the compiled code.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        start = perf_counter()
        try:
            self.stepper = self.baseline.compiled()
            for batch in batches:
                self.decoding(batch).generate(2)
        except Exception as error:  # torch's compiler may lack dependencies on this machine
            return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        return {"seconds": perf_counter() - start}

    def prefill(self, tokens: Sequence[int]) -> dict[str, float]:
        """Seconds to read a prompt into an empty cache, up to the most probable next token."""
        return {"seconds": timed(partial(self.baseline.prefill, tokens))()}

    def decode(self, batch: int, new: int) -> dict[str, float]:
        """Seconds to generate tokens for the first sequences, after their prompts."""
        return {"seconds": timed(partial(self.decoding(batch).generate, new))()}

    def greedy(self, batch: int, new: int) -> dict[str, list[list[int]]]:
        """The tokens that `decode` generates."""
        return {"tokens": self.decoding(batch).generate(new)}

    def memory(self) -> dict[str, int]:
        return rates_llama_cpp.memory()

    def decoding(self, batch: int) -> TorchDecoding:
        """The decoding of the first sequences."""
        if batch not in self.decodings:
            room = self.new if self.stepper is not self.baseline else None
            self.decodings[batch] = TorchDecoding(
                self.baseline, self.stepper, self.prompts[:batch], room
            )
        return self.decodings[batch]


class TorchDecoding:
    """Sequences that decode from the end of their prompts, which have equal lengths.

    stepper: the model of single tokens; the baseline reads the prompts. room: tokens after a prompt
    in a StaticCache; None: a DynamicCache.
    """

    def __init__(
        self,
        baseline: Baseline,
        stepper: Baseline,
        prompts: Sequence[Sequence[int]],
        room: int | None,
    ):
        import torch
        from transformers import DynamicCache, StaticCache

        self.stepper, self.length = stepper, len(prompts[0])
        config = baseline.model.config
        self.static = room is not None
        with torch.inference_mode():
            self.cache = (
                StaticCache(config=config, max_cache_len=self.length + room)
                if self.static
                else DynamicCache(config=config)
            )
            self.first = self.step(baseline, torch.tensor(prompts))

    def step(self, baseline: Baseline, tokens: Any) -> Any:
        """Read tokens; the most probable next token of each sequence."""
        out = baseline.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def to_prompts(self) -> None:
        """Let the cache hold the prompts and nothing else."""
        if not self.static:
            self.cache.crop(self.length - self.cache.get_seq_length())
            return
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.length)

    def generate(self, new: int) -> list[list[int]]:
        """Greedy tokens of every sequence, from the end of its prompt."""
        import torch

        tokens, steps = self.first, []
        with torch.inference_mode():
            self.to_prompts()
            for _ in range(new):
                steps.append(tokens)
                tokens = self.step(self.stepper, tokens)
        return torch.cat(steps, 1).tolist()


if __name__ == "__main__":
    rates_llama_cpp.serve(TransformersWorker())
