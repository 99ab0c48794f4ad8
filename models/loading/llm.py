"""A model with its tokenizer, loaded as published: from a folder or a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.contract import DTYPES, Policy, Spec
from jaxkv.errors import UserError, check_choice
from jaxkv.models.loading import converted
from jaxkv.models.loading.chat import Chat, end_of_turn
from jaxkv.models.loading.compilation import enable_compilation_cache
from jaxkv.models.loading.families import FAMILIES, LLAMA_FORM
from jaxkv.models.loading.sinks import with_sinks
from jaxkv.models.loading.source import ModelSource, open_source
from jaxkv.models.loading.tensors import place_all
from jaxkv.models.loading.tokenizer import Tokenizer
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.network import quantised
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import SINK_TOKENS, Decoder, specs_of
from jaxkv.models.network.device import inference_dtype
from jaxkv.models.network.quantised import FORMATS, Quantised
from jaxkv.platform import gpu as xla_gpu
from jaxkv.policies.prompt_compression import head_shares
from jaxkv.policies.prompt_compression.base import CompressionPolicy
from jaxkv.policy_spec import by_layer
from jaxkv.sampling import Sampling
from jaxkv.typing import Array, Int32

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEFAULT = Path(__file__).parents[1] / "default"  # the model in the package


@dataclass(frozen=True, eq=False)
class Llm:
    """A model.

    weights: flat, by name (models/loading/weight_names.py); shapes until they are loaded.
    path: the folder or the GGUF file that the model is loaded from. dtype: the dtype of the cache
    and of weights that are not quantised. sampling: how tokens are drawn by default
    (models/loading/sampling_settings.py).
    """

    config: Config
    weights: dict[str, Array | Quantised | jax.ShapeDtypeStruct] = field(repr=False)
    tokenizer: Tokenizer
    chat: Chat
    path: Path
    dtype: str
    mesh: Mesh | None = None
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def unloaded_bytes(self) -> int:
        """Bytes of the weights that are not loaded yet."""
        leaves = jax.tree.leaves(self.weights)
        shapes = (leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct))
        return sum(shape.size * shape.dtype.itemsize for shape in shapes)

    @property
    def weight_format(self) -> str:
        """The format of the matrices, int8 or int4; empty if they are floats."""
        formats = {w.FORMAT for w in self.weights.values() if isinstance(w, Quantised)}
        return min(formats, default="")  # with int4 some are in int8

    @property
    def name(self) -> str:
        """The name of the folder, or of the GGUF file without its ending."""
        return self.path.stem if self.path.is_file() else self.path.name

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the weights."""
        if self.path.is_file():
            return (self.path,)
        return tuple(sorted(self.path.glob("*.safetensors")))

    @property
    def input_ids(self) -> int:
        """The number of ids that the model reads: its vocabulary and its sink tokens."""
        rows = self.weights.get(SINK_TOKENS)
        return self.config.vocab + (0 if rows is None else rows.shape[0])

    def checked_ids(self, tokens: Sequence[int]) -> Int32[np.ndarray, " N"]:
        """The token ids of one text as an array; raises UserError for anything else."""
        try:
            ids = np.asarray(tokens)
        except (ValueError, TypeError):  # lists of several lengths
            ids = np.asarray(None)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            received = " ".join(f"{tokens!r}".split())  # arrays print several lines
            raise UserError(
                f"a prompt or text must be a list of token ids, whole numbers, got {received:.60}; "
                "encode it with llm.tokenizer.encode"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < self.input_ids:
            raise UserError(
                f"token ids must be from 0 to {self.input_ids - 1}, got {ids.min()}..{ids.max()}; "
                "give those of the model's own tokenizer"
            )
        pictures = np.isin(ids, self.config.picture_ids)
        if pictures.any():
            raise UserError(
                f"a picture cannot be read, got its token id {ids[pictures][0]}; leave it out of "
                "the prompt"
            )
        return ids.astype(np.int32)

    @property
    def spec(self) -> Spec:
        """The attention of the first layer, for the sizes, which all layers share."""
        return self.specs[0]

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The attention of every layer, as policies need it."""
        return specs_of(self.config, self.dtype)

    @property
    def eos(self) -> tuple[int, ...]:
        """The token ids that end a text, or a turn of the chat template."""
        turn = end_of_turn(self.tokenizer, self.chat)
        return tuple(dict.fromkeys((*self.config.eos, *self.tokenizer.eos, *turn)))

    @property
    def decoder(self) -> Decoder:
        """The nnx module over these weights."""
        return Decoder(self.config, self.weights, self.mesh)

    def fingerprint(self) -> str:
        """A short hash of the settings, the sinks, and the first values of each row of a weight."""
        sinks = self.tokenizer.front
        digest = hashlib.sha256(
            f"{self.config} {self.dtype} {bool(self.weight_format)} {sinks}".encode()
        )
        for leaf in jax.tree.leaves(self.weights):
            digest.update(_margin(leaf).tobytes())
        return digest.hexdigest()[:8]

    def policies(self, chosen: str | Policy | Sequence[Policy | str]) -> tuple[Policy, ...]:
        """One cache policy per layer; raises UserError for anything that is none."""
        for policy in chosen if isinstance(chosen, list | tuple) else [chosen]:
            if not isinstance(policy, str | Policy):
                raise UserError(
                    f"a policy is a string or a value such as Streaming(), got {policy!r}"
                )
        policies = by_layer(chosen, self.config.layers, self.config.windows)
        check_calibration(self.config, policies, lambda: self.source_fingerprint)
        return policies

    @cached_property
    def source_fingerprint(self) -> str:
        """The fingerprint of the model's files (`ModelSource.fingerprint`)."""
        return open_source(self.path).fingerprint()


def check_calibration(
    config: Config, policies: Iterable[Policy], fingerprint: Callable[[], str]
) -> None:
    """Raise UserError for policies with head shares of another model."""
    spec = specs_of(config, "float32")[0]
    names = {policy.calibration for policy in policies if isinstance(policy, CompressionPolicy)}
    for name in sorted(name for name in names if name is not None):
        head_shares.check_model(name, spec, config.layers, fingerprint())


def load(
    name: str | Path = DEFAULT,
    dtype: str | np.dtype | type | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] | None = None,
    weights: str | None = None,
    sinks: str | Path | None = None,
) -> Llm:
    """Load a published model with its tokenizer.

    name: a folder, a GGUF file, a Hub id, or smollm2-135m (smollm2.py); the default is the
    small model in the package (models/default/README.md). GGUF files are dequantised to `dtype`.
    dtype: the dtype of weights and cache; None takes float32 on a CPU, float16 for bfloat16 on a
    GPU without bfloat16 units (float32 for Gemma), and the published dtype elsewhere. A CPU without
    such units multiplies bfloat16 ten times slower. mesh: axes `data` (batch), `model` (heads).
    progress: called with (bytes read, all bytes). weights: int8 or int4
    quantises the matrices while they are loaded (network/quantised.py); None keeps `dtype`. sinks:
    a file of learned tokens or logits for every sequence, constant or constant:TOKEN (sinks.py).
    Raises UserError for anything wrong with the model, and for quantised weights over a mesh.
    """
    source = open_source(name)
    llm = without_weights(source, dtype, mesh, weights, sinks)
    load_weights(llm, source, progress)
    return llm


def without_weights(
    source: ModelSource,
    dtype: str | np.dtype | type | None = None,
    mesh: Mesh | None = None,
    weights: str | None = None,
    sinks: str | Path | None = None,
) -> Llm:
    """The model of `load` without its weights: programs can be compiled before they are loaded."""
    enable_compilation_cache()
    config = source.config
    if dtype is None:
        family = FAMILIES.get(config.family, LLAMA_FORM)
        dtype = inference_dtype(config.dtype, family.overflows)
    dtype = SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype
    with contextlib.suppress(TypeError):
        dtype = jnp.dtype(dtype).name
    check_choice("dtype", dtype, DTYPES)
    if weights not in (None, *FORMATS):
        names = " or ".join(FORMATS)
        raise UserError(f"weights must be {names}, got {weights!r}; leave it out for {dtype}")
    if not isinstance(mesh, Mesh | None):
        raise UserError(
            f"mesh must be a jax.sharding.Mesh with the axes data and model, got {mesh!r:.60}; "
            "make one with jaxkv.state.sharding.mesh_of('model=2')"
        )
    if weights is not None and mesh is not None:
        raise UserError(
            f"weights in {weights} run on one device, got a mesh; leave one of them out"
        )
    place = None if mesh is None else placement(mesh)
    tensors = {
        name: quantised.shapes(name, shape, weights)
        if weights is not None and quantised.is_matrix(name)
        else jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place and place(name, shape))
        for name, (_, shape) in shapes(config).items()
    }
    tokenizer, chat, sampling = source.tokenizer(), source.chat(), source.sampling()
    if sinks is not None:
        config, tokenizer, learned = with_sinks(sinks, source, tokenizer)
        tensors |= {n: jax.device_put(w, place and place(n, w.shape)) for n, w in learned.items()}
    tell_plain_attention(specs_of(config, dtype)[0])
    return Llm(config, tensors, tokenizer, chat, source.path, dtype, mesh, sampling)


def tell_plain_attention(spec: Spec) -> None:
    """Say on standard error that an accelerator reads prompts by plain attention, and why."""
    reason = xla_gpu.plain_attention(spec, jnp.dtype(spec.dtype))
    if jax.default_backend() != "cpu" and reason is not None:
        erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the line of progress
        said = f"{erase}jaxkv: prompts are read by XLA's attention, which is slower: {reason}"
        print(said, file=sys.stderr, flush=True)


def load_weights(
    llm: Llm, source: ModelSource, progress: Callable[[int, int], None] | None = None
) -> None:
    """Replace the shapes in `llm.weights` by arrays; progress: as in `load`."""
    place = None if llm.mesh is None else placement(llm.mesh)
    chosen, dtype = llm.weight_format, jnp.dtype(llm.dtype)
    tensors = source.tensors() if chosen or source.path.is_file() else {}
    missing = {name: llm.weights[name] for name in tensors}
    entry = None
    if source.path.is_file():  # GGUF, whose weights are converted
        sources = {source.path, *(tensor.file for tensor in tensors.values())}
        entry = converted.location(sources, llm.dtype, chosen)
        if entry is not None and (weights := converted.read(entry, missing)) is not None:
            read = weights.__getitem__
            llm.weights.update(place_all(tensors, read, dtype, place, progress))
            return

    def store(name: str, host: np.ndarray) -> np.ndarray | Quantised:
        weight: np.ndarray | Quantised = host
        if chosen and quantised.is_matrix(name):
            tensor_name = f"{tensors[name].name} in {tensors[name].file}"
            weight = quantised.quantise(name, host, chosen, tensor_name)
        keep(name, weight)
        return weight

    with converted.writing(entry, missing) as keep:
        llm.weights.update(source.weights(dtype, place, progress, store))


def _margin(leaf: jax.Array) -> np.ndarray:
    """The first values of each row of a matrix, all of a vector. On a CPU nothing is compiled.

    Every row counts: training of new tokens changes single rows of the embedding.
    """
    first = (..., slice(8)) if leaf.ndim > 1 else ...
    on_host = all(device.platform == "cpu" for device in leaf.devices())
    return np.asarray(leaf)[first] if on_host else np.asarray(leaf[first])


# The axis of a weight that is split over the mesh's `model` axis; others are replicated.
SPLIT = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1, "q_bias": 0, "k_bias": 0,
         "v_bias": 0, "gate_bias": 0, "up_bias": 0, "sink_logits": 0, "expert_gate": 1,
         "expert_up": 1, "expert_down": 2, "expert_gate_bias": 1, "expert_up_bias": 1}  # fmt: skip


def placement(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """The sharding of a weight of this name and shape over a mesh."""
    size = mesh.shape.get("model", 1)

    def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
        axis = SPLIT.get(name.rsplit(".", 1)[-1])
        if axis is None or size == 1 or shape[axis] % size:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "model"))

    return place
