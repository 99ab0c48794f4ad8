"""Every field of known clients is applied, accepted if it asks for nothing, or refused by name."""

from __future__ import annotations

import inspect

import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from jaxkv.serve.engine.request import Request
from jaxkv.serve.http import fields
from jaxkv.serve.http.neutral import NEUTRAL, STREAM_OPTIONS
from tests.serve.http.conftest import events, serving
from tests.serve.http.fake import TEMPLATE, FakeEngine, language
from tests.serve.http.test_bad_input import refused

CREATE = {"completions": Completions.create, "chat": ChatCompletions.create}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
# CompletionRequest of vllm/entrypoints/openai/completion/protocol.py, and ChatCompletionRequest of
# chat_completion/protocol.py, at commit 002032ee2b18e1f7bd924ec47b62504ba3866063.
VLLM = """
use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
add_special_tokens response_format structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
thinking_token_budget stream_interval echo seed
"""
VLLM_ONLY = {
    "completions": "prompt_embeds",
    "chat": "reasoning_effort include_reasoning add_generation_prompt continue_final_message "
    "documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs "
    "return_prompt_text",
}
# Options of POST /completion in tools/server/README.md of llama.cpp at commit
# 00dc8057ab28c9cb4c79a6dd6dfce07fe779f63b, which its OpenAI routes take too.
LLAMA_CPP = """
temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl
n_cache_reuse stream stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty
dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability
xtc_threshold mirostat mirostat_tau mirostat_eta grammar json_schema seed ignore_eos logit_bias
n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers timings_per_token
return_progress sse_ping_interval post_sampling_probs response_fields lora
"""
TALK = [{"role": "user", "content": "a|b"}]
GOOD = {"completions": {"prompt": "a|b"}, "chat": {"messages": TALK}}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
ANY = {bool: (True, False), int: (-1, 0, 7), float: (0.5,), str: ("", "x"), dict: ({}, {"a": "b"}),
       list: ([], ["a"])}  # fmt: skip


def ask(served, kind: str, **body):
    return served.ask("POST", PATHS[kind], {"model": "bytes", "seed": 5} | GOOD[kind] | body)


@pytest.mark.parametrize("kind", CREATE)
def test_every_field_of_known_clients_is_in_the_table(kind):
    openai = inspect.signature(CREATE[kind]).parameters.keys() - OF_THE_CLIENT
    client_fields = {*openai, *VLLM.split(), *VLLM_ONLY[kind].split(), *LLAMA_CPP.split()}
    assert not client_fields - fields.FIELDS[kind].keys() - NEUTRAL[kind].keys()
    assert not fields.FIELDS[kind].keys() & NEUTRAL[kind].keys()


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in NEUTRAL for name in NEUTRAL[kind]])
def test_neutral_values_change_no_answer_and_others_are_refused(served, kind, name):
    accepted = NEUTRAL[kind][name].values
    values = [None]
    for value in accepted:
        values += ANY[value] if isinstance(value, type) else [value]
    plain = ask(served, kind, max_tokens=20).json["choices"]
    request = served.engine.requests[-1]
    for value in values:
        answer = ask(served, kind, max_tokens=20, **{name: value})
        assert answer.status == 200, (value, answer.error)
        assert answer.json["choices"] == plain and served.engine.requests[-1] == request
    for value in (True, 2.5, 3, "else", ["else"], {"else": 1}):
        if value not in values and type(value) not in accepted:
            answer = ask(served, kind, **{name: value})
            refused(answer, 400, [name, "leave it out"])
            assert answer.error["param"] == name


# Defaults of LLAMA_CPP that ask for nothing, as its page gives them.
DEFAULTS = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "n_predict": -1, "n_indent": 0, "n_keep": 0,
    "n_cache_reuse": 0, "stream": False, "stop": [], "typical_p": 1.0, "repeat_last_n": 64,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_allowed_length": 2, "dry_penalty_last_n": 64, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"], "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1, "ignore_eos": False, "logit_bias": [], "n_probs": 0, "min_keep": 0,
    "t_max_predict_ms": 0, "id_slot": -1, "cache_prompt": True, "return_tokens": False,
    "timings_per_token": False, "return_progress": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", CREATE)
def test_defaults_of_llama_cpp_are_accepted(served, kind):
    assert DEFAULTS.keys() <= set(LLAMA_CPP.split())
    plain = ask(served, kind).json["choices"]
    refused = {name: answer.error for name, value in DEFAULTS.items()
               if (answer := ask(served, kind, **{name: value})).status != 200}  # fmt: skip
    assert not refused
    assert ask(served, kind, **DEFAULTS).json["choices"] == plain


@pytest.mark.parametrize("kind", CREATE)
@pytest.mark.parametrize("option", STREAM_OPTIONS)
def test_stream_options(served, kind, option):
    asked = {"stream": True, "max_tokens": 20}
    plain = [event["choices"] for event in events(ask(served, kind, **asked).raw)]
    answer = ask(served, kind, stream_options={option: False, "include_usage": None}, **asked)
    assert [event["choices"] for event in events(answer.raw)] == plain
    refused(ask(served, kind, stream_options={option: True}, **asked), 400, [option])


@pytest.mark.parametrize("kind, limit", [
    ("completions", "max_tokens"), ("chat", "max_tokens"), ("chat", "max_completion_tokens"),
])  # fmt: skip
@pytest.mark.parametrize("max_len, max_new_tokens", [(20_000, 20_000), (None, 131_072)])
def test_no_limit_is_that_of_the_server(kind, limit, max_len, max_new_tokens):
    with serving(FakeEngine(max_len=max_len)) as served:
        answer = ask(served, kind, **{limit: -1})
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        (request,) = served.engine.requests
        assert request.max_new_tokens == (
            max_new_tokens if max_len is None else max_new_tokens - len(request.tokens)
        )


def test_a_seed_of_minus_1_is_drawn(served):
    seeds = {served.complete("|x", seed=-1).status and served.engine.requests[-1].seed
             for _ in range(3)}  # fmt: skip
    assert len(seeds) == 3


def test_an_answer_is_sent_back_with_empty_fields(served):
    empty = {"tool_calls": [], "annotations": [], "refusal": None, "reasoning_content": ""}
    with serving(FakeEngine(), language(TEMPLATE)) as served:
        said = [*TALK, {"role": "assistant", "content": "b"} | empty]
        assert ask(served, "chat", messages=said).status == 200
        said[1]["tool_calls"] = [{"id": "1"}]
        refused(ask(served, "chat", messages=said), 400, ["messages[1]"])


def prompt(template: str, **body) -> str:
    """The text that a template makes of a request with these fields."""
    with serving(FakeEngine(), language(template)) as served:
        answer = ask(served, "chat", max_tokens=1, **body)
        assert answer.status == 200, answer.error
        request: Request = served.engine.requests[0]
    return bytes(token for token in request.tokens if token < 256).decode()


@pytest.mark.parametrize("body, thinking, effort", [
    ({"chat_template_kwargs": {"enable_thinking": False}}, "False", ""),
    ({"reasoning_effort": "none"}, "False", "none"),
    ({"reasoning_effort": "low"}, "True", "low"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "False",
     "low"),
    ({}, "", ""),
])  # fmt: skip
def test_thinking_reaches_a_template_that_reads_it(body, thinking, effort):
    """Elsewhere it asks for nothing, as in transformers and vLLM."""
    assert prompt(TEMPLATE, **body) == prompt(TEMPLATE)
    assert prompt(TEMPLATE + "{{ enable_thinking }}", **body).endswith(f"]{thinking}")
    assert prompt(TEMPLATE + "{{ reasoning_effort }}", **body).endswith(f"]{effort}")


def test_other_variables_are_refused(served):
    for name, value in (("enable_thinking", "yes"), ("enable_thinkin", True)):
        answer = served.chat("|x", chat_template_kwargs={name: value})
        refused(answer, 400, ["template"])
