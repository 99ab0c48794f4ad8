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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxkv.contract import Policy, Spec, State, nbytes, shapes_after_prefill, shapes_of_prompt
from jaxkv.evals.lib import ahead, hlo
from jaxkv.evals.lib.engine_step import engine_step
from jaxkv.models.generation.decoding import Static, decode_block, run_donated
from jaxkv.models.generation.serving import make_model
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.llm import Llm, placement
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import layer_weights, spec_of, step_on
from jaxkv.platform import gpu as xla_gpu
from jaxkv.policy_spec import by_layer
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import programs
from jaxkv.serve.engine.placement import placed, shardings
from jaxkv.state.sharding import bytes_per_device

if TYPE_CHECKING:
    from jaxkv.models.training.training import TrainingSetting

DEPTHS = 2, 4  # layers of the two programs
DTYPE = jnp.bfloat16
PROMPT, ANSWER, CHUNK = 2048, 256, 1024  # tokens
ENGINE_BATCH = 32  # sequences
TRAINED = 32, 16384  # samples in a step, vocabulary
# Every kernel of a step is launched. XLA's command buffers would hide them in the text.
OPTIONS = {"h100": {"xla_gpu_enable_command_buffer": ""}, "v5e": {}, "v5e-8": {}}
SCALARS = {"h100": 0, "v5e": 1024, "v5e-8": 1024}  # elements of operations beside the kernels
Place = SingleDeviceSharding | Mesh
DEVICES: dict[str, Callable[[], Place]] = {
    "h100": lambda: SingleDeviceSharding(ahead.h100()),
    "v5e": lambda: SingleDeviceSharding(ahead.v5e()),
    "v5e-8": ahead.v5e_8,
}
NUM_DEVICES = {"v5e-8": 8}
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
    """A program of a model under a policy.

    program: prefill of one layer; decode; engine, which decodes ENGINE_BATCH sequences; or
    training, with sinks in place of a policy.
    """

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
    CompiledCase("h100", "SmolLM2-135M", "engine", WINDOW),
    CompiledCase("v5e-8", "Llama-3.1-8B", "engine", WINDOW),
    CompiledCase("h100", "160m", "training", "token"),
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


def lowered(case: CompiledCase, layers: int, place: Place) -> tuple[Any, int]:
    """The lowered program, and the bytes of its weights and caches on a device."""
    if case.program == "training":
        return lowered_training(case, layers, place)
    config = config_of(case.model, num_hidden_layers=layers)
    policies = by_layer(case.policy, layers)
    sharding_of = (lambda name, shape: place) if not isinstance(place, Mesh) else placement(place)
    weights = {
        name: jax.ShapeDtypeStruct(shape, DTYPE, sharding=sharding_of(name, shape))
        for name, (_, shape) in shapes(config).items()
    }
    if case.program == "engine":
        return lowered_engine(case, config, weights, place)
    policy = policies[0]
    state = on_device(state_of(policy, spec_of(config, "bfloat16"), case.program), place)
    if case.program == "prefill":
        weights = layer_weights(weights, 0)
        array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        x = array((1, CHUNK, config.width), DTYPE)
        positions, valid = (array((1, CHUNK), dtype) for dtype in (jnp.uint32, jnp.bool_))
        inputs = weights, x, state, positions, valid
        program = run_donated.lower(config, policy, step_on(None), *inputs)
        return program, nbytes((weights, state))
    return lowered_decode(config, policies, weights, state, place)


def lowered_decode(
    config: Config, policies: tuple[Policy, ...], weights: Any, state: State, place: Place
) -> tuple[Any, int]:
    """A decode step of one sequence, and its bytes; state: the shapes of that of each layer."""
    decoding = ahead.shapes_of_decoding(config, (state,) * config.layers, place=place)
    sampling = Sampling()
    static = Static(config, policies, None, xla_gpu.carries_shared_once())
    step = jax.jit(decode_block, static_argnums=(0, 1, 2), donate_argnums=4)
    arguments = static, sampling.filters, config.eos, weights, decoding, sampling.knobs
    return step.lower(*arguments, np.int32(1)), nbytes((weights, decoding.states))


def lowered_engine(
    case: CompiledCase, config: Config, weights: dict[str, Any], place: Place
) -> tuple[Any, int]:
    """A decode step of the serving engine."""
    mesh = place if isinstance(place, Mesh) else None
    llm = Llm(config, weights, None, None, Path(case.model), "bfloat16", mesh)
    model = make_model(llm, case.policy)
    make = partial(programs.empty_batch, model, ENGINE_BATCH, None)
    like = jax.eval_shape(make)
    batch = jax.eval_shape(partial(programs.carry_batch, model), like)
    inputs = (
        batch,
        jax.ShapeDtypeStruct((ENGINE_BATCH,), jnp.bool_),
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    inputs = on_device(inputs, place) if mesh is None else placed(model, inputs)
    function, out = partial(engine_step, model, like.states), None
    if mesh is not None:
        out = shardings(model, jax.eval_shape(function, weights, *inputs))
    step = jax.jit(function, donate_argnums=1, out_shardings=out)
    return step.lower(weights, *inputs), bytes_per_device((weights, inputs[0].states))


def lowered_training(case: CompiledCase, layers: int, place: Place) -> tuple[Any, int]:
    """A training step of a preset on a GPU, whose attention is cuDNN's."""
    from jaxkv.models.training import training  # the extra train

    setting = training_setting(case, layers)
    state = on_device(jax.eval_shape(partial(training.init, setting)), place)
    recipe = setting.recipe
    parts = setting.split(np.zeros((recipe.batch_size, recipe.context + 1), np.int32))
    parts = on_device(jax.ShapeDtypeStruct(parts.shape, parts.dtype), place)
    with mock.patch.object(uncached, "cudnn_lacks", lambda *_: None):
        return training.update.lower(setting, state, parts), nbytes((state.weights, state.moments))


def training_setting(case: CompiledCase, layers: int) -> TrainingSetting:
    """The setting of a training step with so many layers."""
    from jaxkv.models.training.data import FRONT
    from jaxkv.models.training.pretrain import setting_for
    from jaxkv.models.training.recipes import PRESETS

    recipe = replace(
        PRESETS[case.model], layers=layers, sink_variant=case.policy, batch_size=TRAINED[0],
        grad_accum_steps=1,
    )  # fmt: skip
    front = tuple(range(1, 1 + len(FRONT.get(recipe.sink_variant, ()))))
    return replace(setting_for(recipe, TRAINED[1], front, 0), dtype="bfloat16")


def on_device(tree: Any, place: SingleDeviceSharding) -> Any:
    """The shapes of a tree on that device."""
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return jax.tree.map(shape, tree)


def report(case: CompiledCase, place: Place) -> dict[str, Any]:
    """What the compiler made of a case."""
    if case.program == "prefill":
        return figures(*lowered(case, 1, place), case) | {"flops": flops(case, 1)}
    layers = layers_of(case)
    few, many = (figures(*lowered(case, depth, place), case) for depth in DEPTHS)
    step = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    of_layer = {
        name: (many[name] - few[name]) / (DEPTHS[1] - DEPTHS[0])
        for name in hlo.COUNTS
        if name != "moved_bytes"
    }
    extended = {name: few[name] + step * (many[name] - few[name]) for name in NUMBERS}
    return many | extended | {"of_layer": of_layer, "flops": flops(case, layers)}


def layers_of(case: CompiledCase) -> int:
    """The layers of the model of a case."""
    if case.program == "training":
        from jaxkv.models.training.recipes import PRESETS

        return PRESETS[case.model].layers
    return config_of(case.model).layers


NUMBERS = (*hlo.COUNTS, "argument_bytes", "temporary_bytes", "device_bytes")


def flops(case: CompiledCase, layers: int) -> float:
    """Those of the products with weights on a device; in training those of attention too.

    One token's logits are part of a decode step.
    """
    if case.program == "training":
        from jaxkv.models.training import training

        setting = training_setting(case, layers)
        tokens = setting.recipe.batch_size * setting.recipe.context
        return training.flops_per_token(setting.config, setting.recipe.context) * tokens
    tokens = {"prefill": CHUNK, "decode": 1, "engine": ENGINE_BATCH}[case.program]
    config = config_of(case.model, num_hidden_layers=layers)
    head = "head" if config.untied_head else "embed"
    used = ("layers.",) if case.program == "prefill" else ("layers.", head)
    sizes = {name: math.prod(shape) for name, (_, shape) in shapes(config).items()}
    products = sum(size for name, size in sizes.items() if name.startswith(used))
    return 2 * tokens * products / NUM_DEVICES.get(case.device, 1)


def figures(program: Any, argument_bytes: int, case: CompiledCase) -> dict[str, Any]:
    """The figures of one compiled program; of decode, those of its loop.

    device_bytes: of arguments, results and temporaries on a device.
    """
    compiled = program.compile(compiler_options=OPTIONS[case.device])
    memory, loop = compiled.memory_analysis(), case.program in ("prefill", "decode")
    in_all = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return hlo.step_of(compiled.as_text(), SCALARS[case.device], loop) | {
        "argument_bytes": argument_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "device_bytes": in_all - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
    }


def main() -> None:
    device, *names = sys.argv[1:]
    place = DEVICES[device]()
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
