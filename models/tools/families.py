"""The model families that jaxkv runs, as data for `jaxkv models` and docs/models.md."""

from __future__ import annotations

from typing import NamedTuple

from jaxkv.models.loading.config import ARCHITECTURES, LLAMA_FAMILIES, WITH_TOWER
from jaxkv.models.loading.gguf.config import ARCHITECTURES as GGUF_ARCHITECTURES


class FamilyRow(NamedTuple):
    """name: model_type in config.json. models: published ones. beyond: what Llama does not have."""

    name: str
    models: str
    beyond: str

    @property
    def architectures(self) -> list[str]:
        """The names in config.json that select the family."""
        names = [n for n, family in ARCHITECTURES.items() if family == self.name]
        return names + [n for n, kinds in WITH_TOWER.items() if self.name in kinds]

    @property
    def gguf(self) -> bool:
        """Whether GGUF files of it are read."""
        return any(self.name in families for families in GGUF_ARCHITECTURES.values())

    @property
    def trained(self) -> bool:
        """Whether `jaxkv pretrain --from` continues its training."""
        return self.name in LLAMA_FAMILIES


FAMILY_ROWS = tuple(FamilyRow(*row) for row in (
    ("llama", "Llama 2 and 3, SmolLM2, TinyLlama", "nothing"),
    ("mistral", "Mistral", "a window in every layer"),
    ("qwen2", "Qwen2, Qwen2.5", "biases of queries, keys and values; windows"),
    ("qwen3", "Qwen3", "norms of queries and keys; windows"),
    ("gpt_neox", "Pythia, GPT-NeoX", "LayerNorm, a plain MLP, a parallel residual, partial "
     "rotation"),
    ("mpt", "MPT", "LayerNorm without bias, a plain MLP, ALiBi"),
    ("falcon", "Falcon 7B, 11B, 40B and RW", "LayerNorm, a plain MLP, a parallel residual; RW: "
     "ALiBi"),
    ("smollm3", "SmolLM3", "no rotation in every fourth layer"),
    ("olmo2", "OLMo 2", "norms after attention and MLP, and of whole queries and keys"),
    ("olmo3", "OLMo 3", "as OLMo 2; windows in three of four layers, which rotate unscaled"),
    ("gemma2", "Gemma 2", "norms before and after, soft caps, a window in every second layer"),
    ("gemma3_text", "Gemma 3", "as Gemma 2 without soft caps; norms of queries and keys, two "
     "rotations"),
    ("granite", "Granite 3", "four multipliers"),
    ("phi3", "Phi-3, Phi-4-mini", "fused projections, partial rotation"),
    ("glm", "GLM-4 9B (2024)", "biases, half of each head rotated"),
    ("glm4", "GLM-4 9B (2025)", "as glm; norms before and after"),
    ("cohere2", "Command R7B, Command A", "LayerNorm, a parallel block, a logit scale; only layers "
     "with windows rotate"),
    ("exaone4", "EXAONE 4", "norms after attention and MLP, and of queries and keys; only layers "
     "with windows rotate"),
    ("ministral3", "Ministral 3", "queries that grow with the position"),
    ("mixtral", "Mixtral", "experts: a router chooses MLPs for each token"),
    ("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B", "experts, norms of queries and keys"),
    ("olmoe", "OLMoE", "experts, norms of whole queries and keys"),
    ("gpt_oss", "gpt-oss 20b and 120b, in MXFP4 or bfloat16", "experts with biases and a clamped "
     "MLP, windows, a learned sink per head"),
))  # fmt: skip
