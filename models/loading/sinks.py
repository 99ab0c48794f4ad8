"""Sinks in front of a model that exists: learned ones from a file, or a constant token.

A window without its first tokens breaks a model, because many heads put most of their attention
there (StreamingLLM, section 3.1). A sink gives them a place that no text depends on. A constant
sink is a token that begins every stream, so the first cached key and value are the same for all
texts. A learned sink is a vector in place of an embedding, or a logit per head in its
softmax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import files
from jaxkv.errors import UserError
from jaxkv.models.loading.hf.weights import read, read_header, read_metadata
from jaxkv.models.loading.source import ModelSource
from jaxkv.models.loading.tokenizer import END_TEXT, Tokenizer
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import SINK_TOKENS

FORMAT = "jaxkv sinks 1"  # the only metadata of a file, with the model's fingerprint
FILE = "sinks.safetensors"  # its name in the folder of a run
LOGITS = "logits"  # [L, N], the name in a file of the weights layers.*.sink_logits
CONSTANT = "constant"


def write(path: Path, weights: Mapping[str, Any], layers: int, fingerprint: str) -> Path:
    """Write the sinks among the weights of a model, in float32.

    fingerprint: the `ModelSource.fingerprint` of the model that they were trained with.
    """
    from safetensors.numpy import save  # of the extra `train`, as all that trains

    tensors = {}
    if SINK_TOKENS in weights:
        tensors[SINK_TOKENS] = np.asarray(weights[SINK_TOKENS], np.float32)
    names = [f"layers.{i}.sink_logits" for i in range(layers)]
    logits = [weights[name] for name in names if name in weights]
    if logits:
        tensors[LOGITS] = np.stack([np.asarray(row, np.float32) for row in logits])
    files.write({path: save(tensors, metadata={FORMAT: fingerprint})})
    return path


def with_sinks(
    chosen: str | Path, source: ModelSource, tokenizer: Tokenizer
) -> tuple[Config, Tokenizer, dict[str, np.ndarray]]:
    """The config and the tokenizer of a model with sinks, and the weights of the sinks.

    chosen: a file that `jaxkv pretrain` wrote, constant or constant:TOKEN; a text that names a
    constant wins over a file of that name.
    Raises UserError for a file of another model and a token that the tokenizer lacks.
    """
    kind, colon, token = str(chosen).partition(":")
    if kind == CONSTANT and not isinstance(chosen, Path):
        if colon and not token:
            raise UserError(
                f"constant: needs a token after it; write {CONSTANT}:TOKEN or {CONSTANT}"
            )
        return source.config, with_constant(tokenizer, token), {}
    return _learned(Path(chosen), source, tokenizer)


def with_constant(tokenizer: Tokenizer, token: str = "") -> Tokenizer:
    """A tokenizer that begins every stream with one token.

    token: one token as text; without it the BOS that the model expects, which is in front already,
    else <|endoftext|>, else the BOS.
    """
    if not token:
        if tokenizer.front:
            return tokenizer
        ids = [token.id for token in tokenizer.added if token.text == END_TEXT and token.special]
        ids = ids or [i for i in [tokenizer.bos] if i is not None]
        if not ids:
            raise UserError(f"this model has neither {END_TEXT} nor a BOS; give constant:TOKEN")
    else:
        ids = tokenizer.encode(token.replace("\\n", "\n"), bos=False)
    if len(ids) != 1:
        raise UserError(
            f"a constant sink is one token, and {token!r} has {len(ids)}; name another, such as "
            f"{CONSTANT}:{END_TEXT}"
        )
    return dataclasses.replace(tokenizer, front=(ids[0], *tokenizer.front), sinks=(ids[0],))


def _learned(
    path: Path, source: ModelSource, tokenizer: Tokenizer
) -> tuple[Config, Tokenizer, dict[str, np.ndarray]]:
    """As `with_sinks`, for a file."""
    config = source.config
    remedy = f"name a {FILE} that `jaxkv pretrain --from` wrote, or {CONSTANT}"
    tensors, fingerprint = _read(path, remedy)
    model_fingerprint = source.fingerprint()
    if fingerprint != model_fingerprint:
        raise UserError(
            f"the sinks in {path} belong to another model ({fingerprint}, not "
            f"{model_fingerprint}); name that model, or sinks that were trained with this one"
        )
    shapes = {
        SINK_TOKENS: (len(tensors.get(SINK_TOKENS, ())), config.width),
        LOGITS: (config.layers, config.heads),
    }
    for name, value in tensors.items():
        if name not in shapes or value.shape != shapes[name]:
            raise UserError(f"{path} has {name} {list(value.shape)}, which is no sink; {remedy}")
    sink_weights: dict[str, np.ndarray] = {}
    if SINK_TOKENS in tensors:
        sink_weights[SINK_TOKENS] = tensors[SINK_TOKENS]
        ids = tuple(config.vocab + row for row in range(len(tensors[SINK_TOKENS])))
        tokenizer = dataclasses.replace(tokenizer, front=ids, sinks=ids)
    if LOGITS in tensors:
        config = dataclasses.replace(config, sink_logit="learned")
        sink_weights |= {f"layers.{i}.sink_logits": row for i, row in enumerate(tensors[LOGITS])}
    return config, tokenizer, sink_weights


def _read(path: Path, remedy: str) -> tuple[dict[str, np.ndarray], str]:
    """The tensors of a file of sinks, and the fingerprint of their model."""
    try:
        tensors, about = read_header(path), read_metadata(path)
    except OSError as error:
        raise UserError(f"cannot read the sinks {path}: {error.strerror}; {remedy}") from None
    except UserError:
        raise UserError(f"{path} is no file of sinks; {remedy}") from None
    if FORMAT not in about or not tensors:
        raise UserError(f"{path} is no file of sinks of the format {FORMAT!r}; {remedy}")
    for name, tensor in tensors.items():
        if tensor.type != "F32":
            raise UserError(f"{path} has {name} in {tensor.type}, not sinks in F32; {remedy}")
    arrays = {name: read(tensor, np.dtype("f4")) for name, tensor in tensors.items()}
    return arrays, about[FORMAT]
