"""Continued training: a published model as the start of a run (`jaxkv pretrain --from`).

    jaxkv data --tokenizer smollm2-135m --text BOOKS --out data
    jaxkv pretrain --from smollm2-135m --data data --out run --set sink_variant=token --train sinks

Where all weights are trained, a sink token is a new row of the embedding, as in a run from
nothing. Where the embedding is frozen, it is a vector beside it (SINK_TOKENS), so that no logit
changes. Both start from the embedding of the token that the model has seen in front of texts, its
BOS or else the token that ends a document: it is an attention sink before the first step. Sink
logits start at 0, as zero sinks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer as Coder

from jaxkv.errors import UserError
from jaxkv.models.loading import sinks
from jaxkv.models.loading.config import SINK_LLAMA, config_of
from jaxkv.models.loading.families import FAMILIES
from jaxkv.models.loading.source import ModelSource, open_source
from jaxkv.models.loading.tokenizer import Tokenizer, read_tokenizer
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import SINK_TOKENS, Weights
from jaxkv.models.training import data, training
from jaxkv.models.training.data import DataFolder
from jaxkv.models.training.export import export
from jaxkv.models.training.recipes import SINK_LOGIT, Recipe
from jaxkv.models.training.training import TrainingSetting

# Two tokenizers with equal tables of tokens agree if they split this alike.
PROBE = "It's 1,024 words —\n\n  \tnaïve façade, “don't” x2: 北京 😀 e=mc^2\r\nEnd"


@dataclass(frozen=True, eq=False)
class BaseModel:
    """The model that a run starts from."""

    source: ModelSource
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def config(self) -> Config:
        return self.source.config

    def setting(
        self, recipe: Recipe, tokens: DataFolder, mesh: Mesh | None = None
    ) -> TrainingSetting:
        """The setting of a recipe with this model, on these data and devices.

        Raises UserError for data of another tokenizer, and where the result could not be exported.
        """
        if self.config.family in FAMILIES:
            raise UserError(
                f"training continues models of the form of Llama, got {self.source.path} of the "
                f"family {self.config.family}; use Llama, Mistral, Qwen2 or Qwen3"
            )
        training.check_mesh(mesh, recipe)
        self._check_tokenizer(tokens)
        front, vocab = self.tokenizer.front, self.config.vocab
        named = tokens.front(recipe.sink_variant)
        if named:
            in_embedding = recipe.train == "all"
            front = named if in_embedding else tuple(vocab + n for n in range(len(named)))
            vocab = max(vocab, *(i + 1 for i in named)) if in_embedding else vocab
        config = dataclasses.replace(
            self.config,
            vocab=vocab,
            bos=front[0] if named and recipe.train == "all" else self.config.bos,
            sink_logit=SINK_LOGIT.get(recipe.sink_variant, "none"),
        )
        setting = TrainingSetting(recipe, config, front, training.dtype_of(recipe), mesh)
        if recipe.train != "sinks":
            self._fields(config)
        return setting

    def _check_tokenizer(self, tokens: DataFolder) -> None:
        """Raise UserError where the data have the ids of another tokenizer."""
        tokenizer, data_tokenizer = self.tokenizer, read_tokenizer(tokens.folder)
        equal = data_tokenizer.table[: len(tokenizer.table)] == tokenizer.table
        if (
            not equal
            or tokenizer.ids_of(PROBE) != data_tokenizer.ids_of(PROBE)
            or tokens.id_of(data.END) >= len(tokenizer.table)
        ):
            name = self.source.path
            raise UserError(
                f"the data in {tokens.folder} have another tokenizer than {name}; make them with "
                f"`jaxkv data --tokenizer {name}`"
            )

    def weights(self, setting: TrainingSetting, end: int) -> tuple[Weights, Weights]:
        """The weights that the run updates, in float32, and the frozen ones.

        end: the id of the token that ends a document.
        """
        first = next(iter(self.tokenizer.front), end)  # sinks start from its embedding
        row: list[np.ndarray] = []

        def store(name: str, host: np.ndarray) -> np.ndarray:
            if name == "embed":
                row.append(np.array(host[first]))
            if name in ("embed", "head"):
                host = self._with_sink_rows(setting, host, host[first])
            return host if setting.trains(name) else host.astype(setting.dtype)

        def place(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
            return setting.sharding(setting.shapes[name])

        loaded = self.source.weights(np.dtype("f4"), place, None, store)
        frozen = {name: weight for name, weight in loaded.items() if not setting.trains(name)}
        new = {name: shape for name, shape in setting.shapes.items() if name not in loaded}
        # Copies: on a CPU a loaded array is the host's buffer, which a step cannot reuse.
        trained = {name: jnp.copy(loaded[name]) for name in loaded if name not in frozen}
        for name, shape in new.items():
            value = np.tile(row[0], (shape[0], 1)) if name == SINK_TOKENS else np.zeros(shape, "f4")
            trained[name] = jax.device_put(value, setting.sharding(shape))
        return trained, frozen

    def _with_sink_rows(
        self, setting: TrainingSetting, host: np.ndarray, row: np.ndarray
    ) -> np.ndarray:
        """A matrix with a row per id of the run's vocabulary; new sink tokens have `row`."""
        if setting.recipe.train != "all" or setting.front == self.tokenizer.front:
            return host
        added = setting.config.vocab - host.shape[0]
        host = np.concatenate([host, np.tile(row, (added, 1))])
        host[list(setting.front)] = row
        return host

    def export(self, out: Path, setting: TrainingSetting, weights: Weights, writes: bool) -> Path:
        """Write the result of a run: a model folder, a file of sinks, or both; returns the model.

        weights: all of them. writes: False in processes that only return the path.
        """
        only_sinks, layers = setting.recipe.train == "sinks", setting.config.layers
        path = out / sinks.FILE if only_sinks else out / "hf"
        if not writes:
            return path
        if only_sinks:
            return sinks.write(path, weights, layers, self.fingerprint)
        front = [token for token in setting.front if token < setting.config.vocab]
        coder, fields = self._coder(setting), self._fields(setting.config)
        all_weights = {**weights, **self._frozen(setting)}
        export(path, setting.config, all_weights, coder, front, "float32", fields, self._named())
        if SINK_TOKENS in weights:
            fingerprint = open_source(path).fingerprint()
            sinks.write(out / sinks.FILE, {SINK_TOKENS: weights[SINK_TOKENS]}, layers, fingerprint)
        return path

    def _frozen(self, setting: TrainingSetting) -> dict[str, Any]:
        """The weights that a run leaves as they are, in float32.

        They are read again, because they may be in half precision while they are used.
        """
        if all(map(setting.trains, self.source.tensors())):
            return {}

        def store(name: str, host: np.ndarray) -> np.ndarray | None:
            return None if setting.trains(name) else host

        loaded = self.source.weights(np.dtype("f4"), store=store)
        return {name: weight for name, weight in loaded.items() if weight is not None}

    def _coder(self, setting: TrainingSetting) -> Coder:
        """The tokenizer of the result, with the sink tokens that the embedding has rows for."""
        coder = Coder.from_str(self.tokenizer.backend.to_str())
        if setting.recipe.train == "all":
            coder.add_special_tokens(list(data.FRONT.get(setting.recipe.sink_variant, ())))
        return coder

    def _fields(self, config: Config) -> dict[str, Any]:
        """config.json of the result: that of this model with another vocabulary and other sinks.

        Raises UserError where it does not describe the result.
        """
        fields = self.source.fields() | {"vocab_size": config.vocab, "torch_dtype": "float32"}
        if "dtype" in fields:
            fields["dtype"] = "float32"
        family = config.family
        if config.sink_logit != "none":
            named = {"architectures": [SINK_LLAMA], "model_type": "sink_llama"}
            fields |= named | {"sink_logit": config.sink_logit}
            family = "llama"
        ids = {"bos_token_id": config.bos, "eos_token_id": list(config.eos)}
        described = config_of(family, fields, ids, self.source.path)
        if described != dataclasses.replace(config, dtype="float32"):
            raise UserError(
                f"a model folder cannot describe {self.source.path} with these sinks: only "
                "Llamas have sink logits there, and no scaling of positions by a tensor; set "
                "train=sinks, or sink_variant=none, token or two_tokens"
            )
        return fields

    def _named(self) -> Mapping[str, Any]:
        """The fields of tokenizer_config.json that a run keeps: chat template and BOS."""
        template, bos = self.source.chat().template, self.tokenizer.bos
        fields = {} if template is None else {"chat_template": template}
        if bos is not None and not self.tokenizer.front:
            fields["bos_token"] = self.tokenizer.backend.id_to_token(bos)
        return fields


def open_base(name: str | Path) -> BaseModel:
    """Open a model to start from: a folder, a Hub id, a GGUF file or smollm2-135m."""
    source = open_source(name)
    return BaseModel(source, source.tokenizer(), source.fingerprint())
