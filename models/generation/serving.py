"""Run a model of this package in the engine and the server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax.numpy as jnp

from jaxkv import defaults
from jaxkv.contract import Policy, State
from jaxkv.errors import UserError
from jaxkv.models.generation.grammar import Grammar, Matcher, json_rule, matcher_of
from jaxkv.models.generation.response_template import response_parser
from jaxkv.models.generation.streams import warn_of_short_prompt
from jaxkv.models.generation.text import OutputText, warn_beyond_context
from jaxkv.models.loading.chat import Message, conversation_ids
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Pieces
from jaxkv.models.network.config import Config, of_layer
from jaxkv.models.network.decoder import (
    SINK_TOKENS,
    Decoder,
    Weights,
    layer_weights,
    run_layer,
    step_on,
)
from jaxkv.serve.engine import Engine, Model, PrefixConfig
from jaxkv.serve.engine.engine import MEMORY_ADVICE
from jaxkv.serve.engine.plan import resolve_max_len
from jaxkv.state import memory, sharding
from jaxkv.typing import Array, Float, Float32, Int32

PROMPT_END = 4096  # tokens of a prompt in which its answer begins


def make_model(llm: Llm, policy: str | Policy | Sequence[Policy | str] = defaults.POLICY) -> Model:
    """Wrap a loaded model and a cache policy for the engine.

    A mesh has the axis `model` alone. Raises UserError for another mesh, for KV heads that it does
    not divide, and for learned sink tokens.
    """
    if llm.mesh is not None:
        check_mesh(llm.mesh.shape)
        sharding.check(
            llm.mesh, llm.mesh.shape.get("data", 1), llm.config.kv_heads, llm.policies(policy)
        )
    if SINK_TOKENS in llm.weights:
        raise UserError(
            "the engine takes constant sinks and sink logits, got learned sink tokens from a file; "
            "give --sinks constant, or a model trained with --train all"
        )
    policies = llm.policies(policy)

    def embed(weights: Weights, tokens: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
        return Decoder(llm.config, weights).embedded(tokens)

    @cache  # equal layers have one function
    def layer_of(config: Config) -> Callable:
        def layer(policy: Policy, *arguments: object) -> tuple[Float[Array, "B T D"], State]:
            return run_layer(config, policy, step_on(llm.mesh), *arguments)

        return layer

    def head(
        weights: Weights, x: Float[Array, "B T D"], indices: Int32[Array, "B P"]
    ) -> Float32[Array, "B P V"]:
        decoder = Decoder(llm.config, weights)
        return decoder.logits(decoder.normed(jnp.take_along_axis(x, indices[..., None], axis=1)))

    identity = f"{llm.name} {llm.config} {llm.dtype} {llm.weight_format}"
    return Model(
        embed,
        tuple(layer_of(of_layer(llm.config, number)) for number in range(llm.config.layers)),
        head,
        layer_weights,
        llm.weights,
        policies,
        llm.specs,
        llm.config.vocab,
        identity,
        llm.mesh,
    )


def check_mesh(sizes: Mapping[str, int]) -> None:
    """Raise UserError for the sizes of a mesh that splits sequences."""
    if sizes.get("data", 1) > 1:
        raise UserError(
            f"the engine splits KV heads over devices and not sequences, got a mesh with "
            f"data={sizes['data']}; give model=N alone, and start a server for each N devices"
        )


def make_engine(
    llm: Llm,
    policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
    *,
    max_batch: int = 16,
    max_len: int | None = None,
    chunk: int = 128,
    max_prefill_tokens: int | None = None,
    max_stall: float | None = None,
    queue: int = 256,
    queue_tokens: int = 2**20,
    prefix_cache: PrefixConfig | None = None,
    seed: int = 0,
    step_seconds: float = 300.0,
    max_per_owner: int | None = None,
    fixed_batch: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Compile an engine for a loaded model; the arguments are those of `Engine`."""
    model = make_model(llm, policy)
    if prefix_cache is not None and prefix_cache.folder is not None:
        # Between two starts, other weights may get the name of these.
        model = replace(model, identity=f"{model.identity} {llm.fingerprint()}")
    length = resolve_max_len(model.policies, max_len)
    warn_beyond_context(llm, model.policies, length)
    if length is not None:
        warn_of_short_prompt(model.policies, length, "max_len")
    nbytes = sharding.bytes_per_device(model.weights)
    weights = memory.MemoryUse("weights", nbytes, MEMORY_ADVICE["weights"])
    advice = f"{MEMORY_ADVICE['sequences']}, or {MEMORY_ADVICE['prefixes']}"
    with memory.explained(lambda: [weights], advice):
        return Engine(
            model,
            max_batch,
            max_len,
            chunk,
            max_prefill_tokens,
            max_stall,
            queue=queue,
            queue_tokens=queue_tokens,
            prefix_cache=prefix_cache,
            seed=seed,
            step_seconds=step_seconds,
            max_per_owner=max_per_owner,
            fixed_batch=fixed_batch,
            progress=progress,
        )


@dataclass(frozen=True, eq=False)
class Language:
    """The tokenizer and chat template of a loaded model, as the server needs them.

    name: the model name for clients. created: load time, in seconds since 1970.

    allow_special: added tokens that are written out in messages become their ids. Otherwise they
    are text, so that a message cannot end itself and begin one of another role.
    """

    llm: Llm
    name: str
    created: int = field(default_factory=lambda: int(time.time()))
    allow_special: bool = False

    @property
    def eos(self) -> tuple[int, ...]:
        return self.llm.eos

    @property
    def template(self) -> str | None:
        return self.llm.chat.template

    @property
    def response_template(self) -> Mapping[str, object] | None:
        return self.llm.chat.response

    def response_parser(self, ids: Sequence[int], tools: Sequence[Mapping[str, object]]) -> Any:
        """A parser of the answer to a prompt, by the model's `response_template`."""
        end = b"".join(map(self.token_bytes, ids[-PROMPT_END:])).decode("utf-8", "replace")
        return response_parser(self.llm.chat.response, end, tools)

    @cached_property
    def response_marks(self) -> frozenset[str]:
        """The special tokens that stand in the `response_template`."""
        anchors = json.dumps(self.response_template, ensure_ascii=False).replace("\\", "")
        special = (token.text for token in self.llm.tokenizer.added if token.special)
        return frozenset(text for text in special if text in anchors)

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.llm.tokenizer.table))

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables of the chat template that a request may give."""
        return self.llm.chat.variables

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the BOS that the model expects before a text."""
        return self.llm.tokenizer.encode(text)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]:
        """The ids of a conversation, by default up to where the next answer begins.

        variables: more variables of the chat template. continue_final: end within the last message,
        which the answer continues. A model without a chat template takes one message of the user,
        as a plain line. Raises UserError where a template refuses the conversation.
        """
        return conversation_ids(
            self.llm.tokenizer,
            self.llm.chat,
            messages,
            variables,
            add_generation_prompt,
            continue_final,
            self.allow_special,
        )

    def matcher(self, kind: str, value: object) -> Matcher:
        """A matcher of a grammar; the arguments are those of `Grammar`."""
        return matcher_of(self.llm, Grammar(kind, value))

    def literal(self, text: str) -> str:
        """A text in a grammar of Lark's form; a special token stands there by its id."""
        ids = [
            token.id for token in self.llm.tokenizer.added if token.special and token.text == text
        ]
        return f"<[{ids[0]}]>" if ids else json.dumps(text)

    def json_rule(self, schema: Mapping[str, object] | str) -> str:
        """The JSON that obeys a schema, in such a grammar."""
        return json_rule(schema)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id of a prompt adds."""
        pieces = Pieces(self.llm.tokenizer)
        return [pieces.push(token) for token in ids]

    def token_bytes(self, token: int) -> bytes:
        """One token alone, a special one written out; none for ids beyond the vocabulary."""
        table = self.llm.tokenizer.table
        return table[token] if token < len(table) else b""

    def detokenizer(
        self,
        stops: Sequence[str],
        eos: Sequence[int],
        min_new_tokens: int = 0,
        marks: Collection[str] = (),
    ) -> OutputText:
        """The text of a new answer.

        min_new_tokens: stop strings are ignored in the text of so many first tokens. marks: special
        tokens that are written out.
        """
        shown = frozenset(t.id for t in self.llm.tokenizer.added if t.text in marks)
        return OutputText(self.llm, eos, stops, False, min_new_tokens, shown)
