"""Compiles programs for a device that this machine lacks, and prints what became of them.

`python -m jaxkv.evals.benchmarks.compiled_worker DEVICE [CASE...]` prints one line of JSON per case
of CASES, or of those named. Programs of all layers are compiled with two and with four layers: the
difference is what two layers add, and figures of the whole depth follow from it.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxkv.contract import Policy, Spec, State, nbytes, shapes_after_prefill, shapes_of_prompt
from jaxkv.evals.lib import ahead, hlo
from jaxkv.models.generation.decoding import Static, decode_block, run_donated
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import layer_weights, spec_of, step_on
from jaxkv.platform import gpu as xla_gpu
from jaxkv.policy_spec import by_layer
from jaxkv.sampling import Sampling

DEPTHS = 2, 4  # layers of the two programs
DTYPE = jnp.bfloat16
PROMPT, ANSWER, CHUNK = 2048, 256, 1024  # tokens
# Every kernel of a step is launched. XLA's command buffers would hide them in the text.
OPTIONS = {"h100": {"xla_gpu_enable_command_buffer": ""}, "v5e": {}}
SCALARS = {"h100": 0, "v5e": 1024}  # elements of operations that run beside the kernels
DEVICES = {"h100": ahead.h100, "v5e": ahead.v5e}
# Fields of config.json that all models share.
COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


class CompiledCase(NamedTuple):
    """A program of a model under a policy. program: decode, or prefill of one layer."""

    device: str
    model: str
    program: str
    policy: str

    @classmethod
    def of(cls, name: str) -> CompiledCase:
        """The case of this `name`."""
        return cls(*name.split(", ", 3))

    @property
    def name(self) -> str:
        return f"{self.device}, {self.model}, {self.program}, {self.policy}"


WINDOW = "streaming:sinks=4,window=1020"
DECODED = ("full", WINDOW, "reservoir:sinks=4,window=508,sample=512", "h2o:heavy=512,window=512",
           "stratified:sinks=4,window=508,sample=512",
           "balance-stream:sinks=4,window=508,levels=3,block=128", "snapkv:capacity=1024",
           "retrieval:capacity=1024", "retrieval:capacity=1024,every=128", "magicpig")  # fmt: skip
CASES = (
    *(CompiledCase("h100", "SmolLM2-135M", "prefill", policy) for policy in ("full", WINDOW)),
    *(CompiledCase("h100", "SmolLM2-135M", "decode", policy) for policy in DECODED),
    *(CompiledCase("h100", model, program, policy)
      for model in ("Llama-3.2-1B", "Llama-3.1-8B")
      for program in ("prefill", "decode") for policy in ("full", WINDOW)),
    *(CompiledCase("v5e", "Llama-3.2-1B", program, policy)
      for program in ("prefill", "decode") for policy in ("full", WINDOW)),
)  # fmt: skip


def config_of(model: str, **changes: Any) -> Config:
    """The description of a model; changes: of fields of its config.json."""
    fields = COMMON | MODELS[model] | changes
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return read_config(Path(folder))


def state_of(policy: Policy, spec: Spec, program: str) -> State:
    """The shapes of the state of one sequence in a prompt of PROMPT tokens, or after it."""
    if program == "prefill" or policy.min_prompt is None:
        return shapes_of_prompt(policy, spec, PROMPT + (program == "decode") * ANSWER)
    return shapes_after_prefill(policy, spec, PROMPT, ANSWER)


def lowered(case: CompiledCase, layers: int, place: SingleDeviceSharding) -> tuple[Any, int]:
    """The lowered program, and the bytes of its weights and caches."""
    config = config_of(case.model, num_hidden_layers=layers)
    policy = by_layer(case.policy, layers)[0]
    on_device = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    state = jax.tree.map(on_device, state_of(policy, spec_of(config, "bfloat16"), case.program))
    weights = {name: array(shape, DTYPE) for name, (_, shape) in shapes(config).items()}
    if case.program == "prefill":
        weights = layer_weights(weights, 0)
        x = array((1, CHUNK, config.width), DTYPE)
        where = array((1, CHUNK), jnp.uint32), array((1, CHUNK), jnp.bool_)
        program = run_donated.lower(config, policy, step_on(None), weights, x, state, *where)
        return program, nbytes((weights, state))
    decoding = ahead.shapes_of_decoding(config, (state,) * layers, place=place)
    sampling = Sampling()
    static = Static(config, (policy,) * layers, None, xla_gpu.carries_shared_once())
    step = jax.jit(decode_block, static_argnums=(0, 1, 2), donate_argnums=4)
    arguments = static, sampling.filters, config.eos, weights, decoding, sampling.knobs
    return step.lower(*arguments, np.int32(1)), nbytes((weights, decoding.states))


def report(case: CompiledCase, place: SingleDeviceSharding) -> dict[str, Any]:
    """What the compiler made of a case."""
    if case.program == "prefill":
        return figures(*lowered(case, 1, place), case) | {"flops": flops(case, 1, CHUNK)}
    layers = config_of(case.model).layers
    few, many = (figures(*lowered(case, depth, place), case) for depth in DEPTHS)
    step = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    of_layer = {
        name: (many[name] - few[name]) / (DEPTHS[1] - DEPTHS[0])
        for name in ("kernels", "copies", "host_conditions")
    }
    extended = {name: few[name] + step * (many[name] - few[name]) for name in NUMBERS}
    return many | extended | {"of_layer": of_layer, "flops": flops(case, layers, 1)}


NUMBERS = ("kernels", "copies", "host_conditions", "moved_bytes", "argument_bytes")


def flops(case: CompiledCase, layers: int, tokens: int) -> int:
    """Those of the products with weights; one token's logits are part of a decode step."""
    config = config_of(case.model, num_hidden_layers=layers)
    head = "head" if config.untied_head else "embed"
    used = ("layers.", head) if case.program == "decode" else ("layers.",)
    sizes = {name: math.prod(shape) for name, (_, shape) in shapes(config).items()}
    return 2 * tokens * sum(size for name, size in sizes.items() if name.startswith(used))


def figures(program: Any, argument_bytes: int, case: CompiledCase) -> dict[str, Any]:
    """The figures of one compiled program; of a decode step, those of its loop."""
    compiled = program.compile(compiler_options=OPTIONS[case.device])
    return hlo.step_of(compiled.as_text(), SCALARS[case.device]) | {
        "argument_bytes": argument_bytes,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    device, *names = sys.argv[1:]
    place = SingleDeviceSharding(DEVICES[device]())
    platform = "gpu" if device == "h100" else "tpu"
    # The forms of jaxkv/platform follow the default backend.
    with (
        mock.patch("jax.default_backend", lambda: platform),
        ahead.triton_for_h100() if device == "h100" else contextlib.nullcontext(),
    ):
        for case in CASES:
            if case.device == device and (not names or case.name in names):
                print(json.dumps({"case": case.name} | report(case, place)), flush=True)


if __name__ == "__main__":
    main()
