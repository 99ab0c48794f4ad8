"""The baseline: the same weights in transformers, loaded from a folder or random."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxkv.evals.lib.timing import Variant, timed
from jaxkv.models.loading.chat import Chat
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.source import open_source
from jaxkv.models.loading.tokenizer import Tokenizer

# A Llama of 110 million weights (the shape of stories110M), and one for quick runs.
LARGE = {"layers": 12, "width": 768, "heads": 12, "mlp": 2048, "vocab": 32_000}
SMALL = {"layers": 2, "width": 128, "heads": 4, "mlp": 352, "vocab": 2_000}


class Baseline:
    """transformers' own Llama on torch, in float32 on the CPU."""

    def __init__(self, model: Any):
        self.model = model.eval()

    @staticmethod
    def load(folder: Path) -> Baseline:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        return Baseline(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    def prefill(self, prompt: Sequence[int]) -> int:
        """Read a prompt into a cache; return the likeliest next token."""
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def compiled(self) -> Baseline:
        """A second baseline over the same weights, with forward compiled by torch.compile."""
        import copy

        import torch

        copied = Baseline(copy.copy(self.model))
        copied.model.forward = torch.compile(self.model.forward, dynamic=False)
        return copied


def thread_variants(name: str, work: Callable[[], object]) -> dict[str, Variant]:
    """Variants with one and with two torch threads; on a busy machine one is often faster."""

    def run(threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        work()

    return {f"{name}, {n} threads": timed(partial(run, n)) for n in (1, 2)}


def random_llama(shape: dict[str, int], seed: int = 0) -> tuple[Llm, Baseline]:
    """A Llama of random weights with tied embeddings, in jaxkv and in transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["width"],
            intermediate_size=shape["mlp"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["heads"],
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            # Large enough that layers outweigh the embedding; else greedy text repeats a token.
            initializer_range=shape["width"] ** -0.5,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        llama.save_pretrained(folder)
        source = open_source(folder)
        config, weights = source.config, source.weights("float32")
    # The text has no meaning, but detokenizing it is part of the measured time.
    table = tuple(f" {i}".encode() for i in range(config.vocab))
    tokenizer = Tokenizer(lambda *_: [], table, frozenset(), None, (), False)
    return Llm(config, weights, tokenizer, Chat(None), Path("random"), "float32"), Baseline(llama)
