"""Answers of models whose tokenizer has a `response_template`, which transformers reads.

parser = response_parser(llm.chat.response, text_of_the_prompt, tools)
events = parser.feed("<think>Three")    # and so on; see transformers' chat_response_parsing
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jaxkv.errors import UserError

NEEDED = "transformers>=5.13"
FAILURES = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a text


def response_parser(
    template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]] = ()
) -> Any:
    """A parser of one answer, after the part of it that the prompt has already begun.

    template: of tokenizer_config.json. prompt: its end, with special tokens written out. tools: of
    OpenAI's API, whose schemas give the types of arguments.
    Raises UserError without transformers, for a template that it refuses, or for a prompt that has
    begun an answer which the template cannot read.
    """
    module = _module()
    try:
        loaded = module.response_parser.load_response_template(dict(template))
    except FAILURES as error:
        raise UserError(
            f"response_template of tokenizer_config.json: {error}; correct it"
        ) from None
    begun = loaded.truncate_past_last_anchor(prompt)
    # Without an anchor the whole prompt would be the beginning of the answer.
    begun = "" if begun == prompt else begun
    try:
        return module.ResponseParser(loaded, begun, tools=[*tools])
    except FAILURES as error:
        raise UserError(f"the answer that the prompt begins cannot be read: {error}") from None


@cache
def _module() -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is absent
    try:
        from transformers.utils import chat_parsing
        from transformers.utils.chat_parsing import response_parser  # noqa: F401
    except ImportError:
        raise UserError(
            f"this model's answers are divided by its response_template, for which {NEEDED} is not "
            f"installed; pip install '{NEEDED}'"
        ) from None
    return chat_parsing
