"""Fields of other servers: a table of the values that change no answer.

A field that asks for nothing, or for what is done anyway, is accepted. Any other value is refused
by name, with the reason, because ignoring it would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxkv.serve.http.faults import Fault, shown


class Neutral(NamedTuple):
    """values: accepted ones; a type accepts each value of it. why: what others would need."""

    values: tuple[Any, ...]
    why: str

    def check(self, name: str, value: Any) -> None:
        """Raise Fault for a value that would change the answer."""
        if any(_equal(value, accepted) for accepted in self.values):
            return
        rule = " or ".join(map(_described, self.values))
        rule = f"must be {rule}" if rule else "is not supported"
        raise Fault(400, f"{name} {rule}, got {shown(value)}: {self.why}; leave it out", param=name)


TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text",
         dict: "an object", list: "a list"}  # fmt: skip


def _equal(value: Any, accepted: Any) -> bool:
    """Equal, where true is not 1 but 1.0 is."""
    if isinstance(accepted, type):
        return type(value) is accepted
    return value == accepted and (type(value) is bool) == (type(accepted) is bool)


def _described(accepted: Any) -> str:
    return TYPES[accepted] if isinstance(accepted, type) else shown(accepted)


NUMBER = (int, float)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CACHE = "this server caches every prefix, and answers are equal with and without it"
RECORDS = "the provider's records and bills have it, and this server has none"
TEXT_ONLY = "the models are decoders of text"
NO_TOOLS = "a client must parse calls of tools itself"
ONE_ANSWER = "only sampling is supported, with n for several answers"
IDS = "only log probabilities and text are reported; /render returns token ids"
UNCUT = "text and special tokens of an answer are reported in one way"
PENALTY = "only repetition_penalty, presence_penalty and frequency_penalty are supported"
SAMPLER = "only temperature, top_k, top_p and min_p are supported"
GRAMMAR = "tokens are not constrained"
DISAGGREGATED = "one server computes prefill and decode"

SHARED: dict[str, Neutral] = {
    # OpenAI
    "best_of": Neutral((1,), ONE_ANSWER),
    # vLLM and its router
    "use_beam_search": Neutral((False,), ONE_ANSWER),
    "length_penalty": Neutral((1,), ONE_ANSWER),
    "watermarking": Neutral((False,), "answers have no watermark"),
    "include_stop_str_in_output": Neutral((False,), "an answer ends before its stop string"),
    "skip_special_tokens": Neutral((True,), UNCUT),
    "spaces_between_special_tokens": Neutral((bool,), UNCUT),
    "truncate_prompt_tokens": Neutral((), "prompts are never cut"),
    "truncation_side": Neutral(("left", "right"), "prompts are never cut"),
    "prompt_logprobs": Neutral((), "echo with logprobs scores the prompt of a completion"),
    "logprob_token_ids": Neutral((), "the likeliest tokens and the sampled one are scored"),
    "allowed_token_ids": Neutral((), GRAMMAR),
    "bad_words": Neutral(([],), "logit_bias bans single tokens"),
    "structured_outputs": Neutral((), GRAMMAR),
    "repetition_detection": Neutral((), "stop and max_tokens end an answer"),
    "thinking_token_budget": Neutral((-1,), "thoughts are not told apart"),
    "priority": Neutral((0,), "API keys take turns instead"),
    "request_id": Neutral((), "the header X-Request-ID names a request"),
    "session_id": Neutral((str,), RECORDS),
    "stream_interval": Neutral((1,), "each token is sent at once"),
    "return_tokens_as_token_ids": Neutral((False,), IDS),
    "return_token_ids": Neutral((False,), IDS),
    "return_token_offsets": Neutral((False,), IDS),
    "return_hidden_states": Neutral((False,), IDS),
    "return_mm_kwargs": Neutral((bool,), TEXT_ONLY),
    "routed_experts_prompt_start": Neutral((0,), "there are no experts"),
    "kv_transfer_params": Neutral((), DISAGGREGATED),
    "ec_transfer_params": Neutral((), DISAGGREGATED),
    "vllm_xargs": Neutral(({},), "there are no extensions"),
    "no_stop_trim": Neutral((False,), "an answer ends before its stop string"),
    # llama.cpp
    "cache_prompt": Neutral((bool,), CACHE),
    "n_cache_reuse": Neutral((0,), "only exact prefixes are reused"),
    "id_slot": Neutral((-1,), "the server chooses the batch entry"),
    "n_predict": Neutral((-1,), "max_tokens bounds an answer"),
    "n_keep": Neutral((int,), "prompts are never cut"),
    "n_indent": Neutral((0,), GRAMMAR),
    "n_cmpl": Neutral((1,), ONE_ANSWER),
    "n_probs": Neutral((0,), "logprobs reports log probabilities"),
    "post_sampling_probs": Neutral((False,), "log probabilities are those of the model"),
    "min_keep": Neutral((0, 1), SAMPLER),
    "samplers": Neutral((), SAMPLER),
    "typical_p": Neutral((1,), SAMPLER),
    "dynatemp_range": Neutral((0,), SAMPLER),
    "dynatemp_exponent": Neutral(NUMBER, SAMPLER),
    "xtc_probability": Neutral((0,), SAMPLER),
    "xtc_threshold": Neutral(NUMBER, SAMPLER),
    "mirostat": Neutral((0,), SAMPLER),
    "mirostat_tau": Neutral(NUMBER, SAMPLER),
    "mirostat_eta": Neutral(NUMBER, SAMPLER),
    "repeat_penalty": Neutral((1,), PENALTY),
    "repeat_last_n": Neutral((int,), PENALTY),
    "dry_multiplier": Neutral((0,), PENALTY),
    "dry_base": Neutral(NUMBER, PENALTY),
    "dry_allowed_length": Neutral((int,), PENALTY),
    "dry_penalty_last_n": Neutral((int,), PENALTY),
    "dry_sequence_breakers": Neutral((list,), PENALTY),
    "grammar": Neutral(("",), GRAMMAR),
    "json_schema": Neutral((), GRAMMAR),
    "t_max_predict_ms": Neutral((0,), "max_tokens bounds an answer"),
    "return_tokens": Neutral((False,), IDS),
    "timings_per_token": Neutral((False,), "/metrics has times"),
    "return_progress": Neutral((False,), "a stream begins with the first token"),
    "sse_ping_interval": Neutral((), "silent streams get a comment every 5 seconds"),
    "response_fields": Neutral(([],), "responses have all fields"),
    "lora": Neutral(([],), "there are no adapters"),
}
NEUTRAL: dict[str, dict[str, Neutral]] = {
    "completions": SHARED
    | {
        "suffix": Neutral(("",), "nothing is inserted before a text"),
        "prompt_embeds": Neutral((), TEXT_ONLY),
        "add_special_tokens": Neutral((True,), "a text begins with the model's BOS"),
    },
    "chat": SHARED
    | {
        # OpenAI
        "audio": Neutral((), TEXT_ONLY),
        "modalities": Neutral((["text"],), TEXT_ONLY),
        "functions": Neutral(([],), NO_TOOLS),
        "function_call": Neutral(("none", "auto"), NO_TOOLS),
        "tools": Neutral(([],), NO_TOOLS),
        "tool_choice": Neutral(("none", "auto"), NO_TOOLS),
        "parallel_tool_calls": Neutral((bool,), NO_TOOLS),
        "moderation": Neutral((), "nothing is moderated"),
        "prediction": Neutral((dict,), "it may only make an answer faster"),
        "prompt_cache_options": Neutral((dict,), CACHE),
        "prompt_cache_retention": Neutral(("in_memory", "24h"), CACHE),
        "store": Neutral((False,), "nothing is stored"),
        "verbosity": Neutral(("low", "medium", "high"), "the models have no such setting"),
        "web_search_options": Neutral((), "there is no search"),
        # vLLM: no answer has a part that is marked as reasoning
        "include_reasoning": Neutral((bool,), "thoughts are not told apart"),
        "separate_reasoning": Neutral((bool,), "thoughts are not told apart"),
        "stream_reasoning": Neutral((bool,), "thoughts are not told apart"),
        "echo": Neutral((False,), "a message is answered without the prompt"),
        "add_special_tokens": Neutral((False,), "the chat template writes special tokens"),
        "documents": Neutral(([],), "write them into a message"),
        "chat_template": Neutral((), "the server's --chat-template replaces the template"),
        "media_io_kwargs": Neutral(({},), TEXT_ONLY),
        "mm_processor_kwargs": Neutral(({},), TEXT_ONLY),
        "return_prompt_text": Neutral((False,), IDS),
        # llama.cpp
        "reasoning_format": Neutral(("none",), "thoughts are not told apart"),
        "thinking_forced_open": Neutral((False,), "thoughts are not told apart"),
        "parse_tool_calls": Neutral((bool,), NO_TOOLS),
    },
}
# Of stream_options, besides include_usage.
STREAM_OPTIONS: dict[str, Neutral] = {
    "include_obfuscation": Neutral((False,), "events are not padded"),
    "continuous_usage_stats": Neutral((False,), "the last event has the usage"),
}
# Of chat_template_kwargs, where the template does not read them: a model without such modes.
VARIABLES: dict[str, Neutral] = {
    "enable_thinking": Neutral((bool,), "the chat template has no such variable"),
    "thinking": Neutral((bool,), "the chat template has no such variable"),
    "reasoning_effort": Neutral(EFFORTS, "the chat template has no such variable"),
}


def template_variables(
    requested: Mapping[str, Any] | None, effort: str | None, names: frozenset[str]
) -> dict[str, Any]:
    """The variables for a chat template that reads `names`.

    requested: variables of the request.
    effort: its reasoning_effort, which also turns thinking on or off.
    Raises Fault for another name, except a neutral variable with an accepted value.
    """
    hints = {} if effort is None else {"reasoning_effort": effort}
    hints |= {"enable_thinking": effort != "none"} if hints else {}
    variables = {name: value for name, value in hints.items() if name in names} | (requested or {})
    unread = [name for name in variables if name in VARIABLES and name not in names]
    for name in unread:
        VARIABLES[name].check(f"chat_template_kwargs.{name}", variables.pop(name))
    unknown = next((name for name in variables if name not in names), None)
    if unknown is not None and names:  # without any, the template itself refuses it
        message = f"the chat template has no variable {shown(unknown)}, it reads "
        message += f"{', '.join(sorted(names))}; leave it out"
        raise Fault(400, message, param="chat_template_kwargs")
    return variables
