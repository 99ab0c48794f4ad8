"""The fields of a request: a table with the type, range and default of each.

Unknown fields and unsupported values are refused, because ignoring them would change the answer.
Null is accepted in every field that may be absent, and so are the values of other servers' fields
without effect.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.serve.http.checks import (
    MAX_COUNT,
    Check,
    check_keys,
    check_known,
    equal,
    flag,
    integer,
    invalid,
    is_ids,
    long_text,
    number,
    one_of,
    salt,
    text,
    text_up_to,
    token_ids,
    token_limit,
    top_p,
    unless,
    valid_unicode,
    variables,
)
from jaxkv.serve.http.errors import APIError, shown
from jaxkv.serve.http.messages import ToolChoice, messages, tool_choice, tools

MAX_TOP_LOGPROBS = 20  # log probabilities beside each token
MAX_STOPS, MAX_BIASES = 4, 300
MAX_STOP = 200  # characters
MAX_GRAMMAR = 2**20  # characters of the JSON of a grammar, with descriptions: some 30 ms


class Field(NamedTuple):
    """check: returns the parsed value or raises APIError. default: for absent and null.

    remedy: what to do where the field is absent, if it is required.
    """

    check: Check
    default: Any = None
    remedy: str = ""


class GrammarField(NamedTuple):
    """What an answer must be, and the field that says so. kind: json_object, json_schema, ..."""

    name: str
    kind: str
    value: Any = None


def response_format(name: str, value: Any) -> GrammarField | None:
    """The format of OpenAI: any text, any JSON object, or a schema."""
    kinds = ("text", "json_object", "json_schema")
    if type(value) is not dict or value.get("type") not in kinds:
        raise invalid(name, f"an object whose type is one of {', '.join(kinds)}", value)
    kind = value["type"]
    if kind != "json_schema":
        check_keys(name, value, {"type"})
        return None if kind == "text" else GrammarField(name, kind)
    check_keys(name, value, {"type", "json_schema"})
    inner, described = f"{name}.json_schema", value.get("json_schema")
    if type(described) is not dict or type(described.get("schema")) is not dict:
        raise invalid(inner, "an object with a schema", described)
    check_keys(inner, described, {"name", "description", "schema", "strict"})
    for key, check in (("name", text), ("description", long_text), ("strict", flag)):
        if described.get(key) is not None:
            check(f"{inner}.{key}", described[key])
    return GrammarField(f"{inner}.schema", kind, described["schema"])


# Of structured_outputs, and of older vLLM with "guided_" before it: the name -> the kind.
STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def structured_outputs(name: str, value: Any) -> GrammarField | None:
    """The form of vLLM: an object with one of json, regex, choice, grammar and json_object."""
    accepted = {*STRUCTURES, "json_object"}
    asked = {} if type(value) is not dict else {k: v for k, v in value.items() if v is not None}
    if type(value) is not dict or len(asked) > 1:
        raise invalid(name, f"an object with one of {', '.join(sorted(accepted))}", value)
    check_keys(name, asked, accepted)
    for key, content in asked.items():
        inner = f"{name}.{key}"
        if key == "json_object":
            return GrammarField(inner, key) if flag(inner, content) else None
        return GrammarField(inner, STRUCTURES[key], content)
    return None


def structure(kind: str) -> Check:
    """A field that is a grammar itself."""
    return lambda name, value: GrammarField(name, kind, value)


def stops(name: str, value: Any) -> tuple[str, ...]:
    several = [value] if type(value) is str else value
    if type(several) is not list or len(several) > MAX_STOPS:
        raise invalid(name, f"a text or at most {MAX_STOPS} of them", value)
    return tuple(text_up_to(MAX_STOP)(name, stop) for stop in several)


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    rule = f"an object of at most {MAX_BIASES} token ids, each with a number from -100 to 100"
    if type(value) is not dict or len(value) > MAX_BIASES or not all(map(_is_id_text, value)):
        raise invalid(name, rule, value)
    size = number(-100.0, 100.0)
    return tuple(sorted((int(token), size(name, bias)) for token, bias in value.items()))


def _is_id_text(text: str) -> bool:
    """Whether a text is a token id as JSON writes it, without leading zeros."""
    # Its length comes first, because int() is slow for thousands of digits.
    short = len(text) <= len(str(MAX_COUNT))
    return short and text.isascii() and text.isdigit() and text == str(int(text))


def stream_options(name: str, value: Any) -> bool:
    """Whether to send the usage."""
    if type(value) is not dict or value.keys() - {"include_usage", *STREAM_OPTIONS}:
        raise invalid(name, f"an object of include_usage, {', '.join(STREAM_OPTIONS)}", value)
    for option, check in STREAM_OPTIONS.items():
        if value.get(option) is not None:
            check(f"{name}.{option}", value[option])
    return flag(f"{name}.include_usage", value.get("include_usage") or False)


def prompt(name: str, value: Any) -> list[str | list[int]]:
    """A list of texts or of lists of ids, also for one prompt."""
    several = value if type(value) is list and not is_ids(value) else [value]
    if not several or not (
        all(type(entry) is str for entry in several)
        or all(type(entry) is list and is_ids(entry) for entry in several)
    ):
        raise invalid(name, "a text, a list of token ids, or a list of either", value)
    return [valid_unicode(name, entry) if type(entry) is str else entry for entry in several]


TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text",
         dict: "an object", list: "a list"}  # fmt: skip


def ignored(*values: Any) -> Check:
    """A check that accepts values which change no answer; a type accepts each value of it."""
    names = (TYPES[value] if isinstance(value, type) else shown(value) for value in values)
    rule = f"must be {' or '.join(names)}" if values else "is not supported"

    def check(name: str, value: Any) -> None:
        if not any(equal(value, accepted) for accepted in values):
            message = f"{name} {rule}, got {shown(value)}; leave it out"
            raise APIError(400, message, param=name)

    return check


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Fields of OpenAI, vLLM, its router and llama.cpp, with the values that change no answer. A type
# stands for each value of it.
IGNORED: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
    "both": (
        ("truncate_prompt_tokens prompt_logprobs logprob_token_ids allowed_token_ids "
         "repetition_detection request_id kv_transfer_params ec_transfer_params "
         "samplers sse_ping_interval", ()),
        ("use_beam_search watermarking include_stop_str_in_output no_stop_trim post_sampling_probs "
         "return_tokens_as_token_ids return_token_ids return_token_offsets return_hidden_states "
         "return_tokens timings_per_token return_progress", (False,)),
        ("skip_special_tokens", (True,)),
        ("spaces_between_special_tokens return_mm_kwargs cache_prompt", (bool,)),
        ("n_probs n_indent priority routed_experts_prompt_start n_cache_reuse t_max_predict_ms "
         "dynatemp_range xtc_probability mirostat dry_multiplier", (0,)),
        ("best_of n_cmpl length_penalty stream_interval typical_p repeat_penalty", (1,)),
        ("min_keep", (0, 1)),
        ("thinking_token_budget id_slot n_predict", (-1,)),
        ("n_keep repeat_last_n dry_allowed_length dry_penalty_last_n", (int,)),
        ("dynatemp_exponent xtc_threshold mirostat_tau mirostat_eta dry_base", (int, float)),
        ("truncation_side", ("left", "right")),
        ("session_id user prompt_cache_key safety_identifier", (str,)),  # for a provider's records
        ("service_tier", ("auto", "default")),
        ("bad_words response_fields lora", ([],)),
        ("dry_sequence_breakers", (list,)),
        ("vllm_xargs", ({},)),
        ("metadata", (dict,)),
    ),
    "completions": (
        ("suffix", ("",)),
        ("prompt_embeds", ()),
        ("add_special_tokens", (True,)),
    ),
    "chat": (
        ("audio moderation web_search_options chat_template", ()),
        ("store echo thinking_forced_open add_special_tokens return_prompt_text", (False,)),
        ("parse_tool_calls include_reasoning separate_reasoning "
         "stream_reasoning", (bool,)),
        ("functions documents", ([],)),
        ("function_call", ("none", "auto")),
        ("modalities", (["text"],)),
        ("media_io_kwargs mm_processor_kwargs", ({},)),
        ("prediction prompt_cache_options", (dict,)),
        ("prompt_cache_retention", ("in_memory", "24h")),
        ("verbosity", ("low", "medium", "high")),
        ("reasoning_format", ("none",)),
    ),
}  # fmt: skip
# Of stream_options, besides include_usage.
STREAM_OPTIONS = {
    "include_obfuscation": ignored(False),
    "continuous_usage_stats": ignored(False),
}
# Of chat_template_kwargs, where the template does not read them: a model without such modes.
VARIABLES = {
    "enable_thinking": ignored(bool),
    "thinking": ignored(bool),
    "reasoning_effort": ignored(*EFFORTS),
}
# Fields that say what an answer must be; a request has at most one of them.
GRAMMARS = {
    "response_format": Field(response_format),
    "structured_outputs": Field(structured_outputs),
    **{f"guided_{name}": Field(structure(kind)) for name, kind in STRUCTURES.items()},  # vLLM
    "json_schema": Field(structure("json_schema")),  # llama.cpp
    "grammar": Field(unless("", None, structure("grammar"))),  # llama.cpp, whose pages send ""
}
SHARED = {
    "model": Field(text, remedy="give a name that /v1/models lists"),
    # Where these five are absent, the settings of the model apply.
    "temperature": Field(number(0.0, 2.0)),
    "top_p": Field(top_p),
    "top_k": Field(unless(-1, 0, integer(-1, MAX_COUNT))),  # vLLM's -1 is all tokens, as 0 here
    "min_p": Field(number(0.0, 1.0)),
    "repetition_penalty": Field(number(0.01, 100.0)),
    "presence_penalty": Field(number(-2.0, 2.0), 0.0),
    "frequency_penalty": Field(number(-2.0, 2.0), 0.0),
    "logit_bias": Field(unless([], (), biases), ()),  # llama.cpp's default is a list
    "n": Field(integer(1, 128), 1),
    "seed": Field(unless(-1, None, integer(0, 2**32 - 1))),  # llama.cpp's -1 draws a seed
    "stop": Field(stops, ()),
    "ignore_eos": Field(flag, False),
    "stream": Field(flag, False),
    "stream_options": Field(stream_options),
    "cache_salt": Field(salt),
    "min_tokens": Field(integer(0, MAX_COUNT), 0),
    "stop_token_ids": Field(token_ids, ()),
} | GRAMMARS
# What an answer that obeys a grammar cannot have: it may end early, and it has a beginning.
CLASHES = ("ignore_eos", "min_tokens", "echo", "continue_final_message")
ROUTES = {
    "completions": {
        "prompt": Field(prompt, remedy="give it"),
        "max_tokens": Field(token_limit(0)),
        "logprobs": Field(unless(False, None, integer(0, MAX_TOP_LOGPROBS))),  # as in a chat
        "echo": Field(flag, False),
    },
    "chat": {
        "messages": Field(messages, remedy="give it"),
        "max_tokens": Field(token_limit(1)),
        "max_completion_tokens": Field(token_limit(1)),
        "logprobs": Field(flag, False),
        "top_logprobs": Field(integer(0, MAX_TOP_LOGPROBS)),
        "chat_template_kwargs": Field(variables),
        "reasoning_effort": Field(one_of(*EFFORTS)),
        "add_generation_prompt": Field(flag),
        "continue_final_message": Field(flag, False),
        "tools": Field(tools, ()),
        "tool_choice": Field(tool_choice, ToolChoice("auto")),
        "parallel_tool_calls": Field(flag, True),
    },
}
# Every field of each route.
FIELDS: dict[str, dict[str, Field]] = {
    kind: {
        name: Field(ignored(*values))
        for names, values in (*IGNORED["both"], *IGNORED[kind])
        for name in names.split()
    }
    | SHARED
    | fields
    for kind, fields in ROUTES.items()
}


def validate(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every field of a request. kind: a key of FIELDS. Raises APIError."""
    table = FIELDS[kind]
    check_known(body, table)
    values = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None and field.remedy:
            raise APIError(400, f"{name} is missing; {field.remedy}", param=name)
        values[name] = field.default if value is None else field.check(name, value)
    if values["stream_options"] is not None and not values["stream"]:
        message = "stream_options is for streams, got stream=false; leave it out"
        raise APIError(400, message, param="stream_options")
    if values.get("top_logprobs") and not values["logprobs"]:  # 0 asks for none
        message = "top_logprobs needs logprobs, got logprobs=false; set it to true"
        raise APIError(400, message, param="top_logprobs")
    if values.get("continue_final_message"):
        _check_continued(values)
    grammars = [values[name] for name in GRAMMARS if values[name] is not None]
    if len(grammars) > 1:
        first, second = (field.name for field in grammars[:2])
        message = f"{first} and {second} exclude each other; give one"
        raise APIError(400, message, param=second)
    must_call = kind == "chat" and values["tool_choice"].mode == "required"
    if grammars or must_call:
        name = grammars[0].name if grammars else "a tool_choice that calls a tool"
        if (clash := next((name for name in CLASHES if values.get(name)), None)) is not None:
            message = f"{clash} and {name} exclude each other; leave {clash} out"
            raise APIError(400, message, param=clash)
    if grammars:
        _check_grammar(grammars[0])
    if kind == "chat":
        _check_tool_choice(values, grammars)
    return values | {"structure": grammars[0] if grammars else None}


def _check_grammar(grammar: GrammarField) -> None:
    """Raise APIError for a grammar that is too large to look at, or has lone surrogates."""
    with contextlib.suppress(RecursionError):  # such a schema is refused when it is read
        text = json.dumps(grammar.value, ensure_ascii=False)
        if len(text) > MAX_GRAMMAR:
            message = f"{grammar.name} may have {MAX_GRAMMAR} characters, got {len(text)}"
            raise APIError(400, f"{message}; give a smaller one", param=grammar.name)
        valid_unicode(grammar.name, text)


def _check_tool_choice(values: dict[str, Any], grammars: Sequence[GrammarField]) -> None:
    """Raise APIError for a tool that is not there, and for two grammars of an answer."""
    choice, names = values["tool_choice"], [tool["function"]["name"] for tool in values["tools"]]
    absent = next((name for name in choice.names or () if name not in names), None)
    if choice.mode == "required" and not names:
        message = "tool_choice needs tools, got none; give tools"
        raise APIError(400, message, param="tool_choice")
    if absent is not None:
        listed = ", ".join(names) or "none"
        message = f"tool_choice {shown(absent)} needs a tool of that name, got {listed}; give it"
        raise APIError(400, message, param="tool_choice")
    if choice.mode != "required":
        return
    if grammars:
        message = f"{grammars[0].name} and a tool_choice that calls a tool exclude each other"
        raise APIError(400, f"{message}; leave one out", param="tool_choice")


def _check_continued(values: dict[str, Any]) -> None:
    """Raise APIError unless the last message can be continued."""
    if values["add_generation_prompt"]:
        message = "continue_final_message and add_generation_prompt exclude each other; give one"
        raise APIError(400, message, param="add_generation_prompt")
    role = values["messages"][-1]["role"]
    if role != "assistant":
        message = f"continue_final_message needs a last message of the assistant, got {role}"
        raise APIError(400, f"{message}; leave it out", param="continue_final_message")


def template_variables(
    requested: Mapping[str, Any] | None, effort: str | None, names: frozenset[str]
) -> dict[str, Any]:
    """The variables for a chat template that reads `names`.

    requested: variables of the request.
    effort: its reasoning_effort, which also turns thinking on or off.
    Raises APIError for another name, except one of VARIABLES with an accepted value.
    """
    if "tools" in (requested or ()):
        message = "chat_template_kwargs must not have tools; give the field tools"
        raise APIError(400, message, param="chat_template_kwargs")
    hints = {} if effort is None else {"reasoning_effort": effort}
    hints |= {"enable_thinking": effort != "none"} if hints else {}
    variables = {name: value for name, value in hints.items() if name in names} | (requested or {})
    unread = [name for name in variables if name in VARIABLES and name not in names]
    for name in unread:
        VARIABLES[name](f"chat_template_kwargs.{name}", variables.pop(name))
    unknown = next((name for name in variables if name not in names), None)
    if unknown is not None and names:  # without any, the template itself refuses it
        message = f"the chat template has no variable {shown(unknown)}, it reads "
        message += f"{', '.join(sorted(names))}; leave it out"
        raise APIError(400, message, param="chat_template_kwargs")
    return variables
