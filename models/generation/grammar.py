"""Answers that obey a JSON schema, a regular expression or a grammar, by llguidance.

matcher = matcher_of(llm, Grammar("json_schema", schema))
matcher.allowed()    # which tokens may come next
matcher.advance(token)
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import numpy as np

from jaxkv.defaults import JSON_LAYOUT
from jaxkv.errors import UserError, check_choice
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Tokenizer
from jaxkv.typing import Bool

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
MAX_SIZE = 2**16  # characters of a grammar: compiling so many takes less than a second
MAX_JSON = 2**20  # characters of the JSON of a schema, with descriptions, which are left out
MAX_RULES = 200  # of a grammar in the form of llama.cpp, which is translated in quadratic time
MAX_PATTERN = 2**14  # characters of a regular expression, which is read in quadratic time
LEXER_FUEL = 50_000, 6  # of an expression before the answer, and more a character: some 20 ms
MAX_ITEMS = 10_000  # of the parser in a step: some 10 ms, in which other answers wait
MAX_NUMBER = 2**53  # larger whole numbers are rounded
MAX_REASON = 300  # characters
MAX_TOKEN = 200  # bytes of a token: llguidance takes no tree of tokens with thousands of levels


@dataclass(frozen=True)
class Grammar:
    """What an answer must be.

    kind: json_object for any object; json_schema with a schema as a dict or its JSON;
    regex with an expression that the answer matches as a whole; choice with a list of texts;
    grammar with a context-free grammar, in the forms of Lark or of llama.cpp (GBNF).
    """

    kind: Kind
    value: Any = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))


class Matcher:
    """How far one answer obeys a grammar.

    complete: the answer obeys it and may end. ended: no token may follow.
    """

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def copy(self) -> Matcher:
        """A matcher at the same place, for another answer."""
        return Matcher(self._matcher.deep_copy(), self._vocab)

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Which tokens may come next. Raises UserError beyond the limits of llguidance."""
        allowed = _allowed(self._matcher, self._vocab)
        self._check()
        return allowed

    def advance(self, token: int) -> None:
        """Add a token to the answer. Raises UserError for one that is not allowed."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"{_reason(self._matcher.get_error())}; give a simpler grammar")


def _allowed(matcher: Any, vocab: int) -> Bool[np.ndarray, " V"]:
    """Which tokens a matcher of llguidance allows next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[:vocab].astype(bool)


def matcher_of(llm: Llm, grammar: Grammar) -> Matcher:
    """A matcher of an empty answer. Raises UserError for a grammar that no text obeys."""
    if not llm.eos:
        raise UserError("an answer that obeys a grammar ends, and this model has no EOS token")
    guidance = _llguidance()
    text = _compiled(guidance, grammar)
    fuel, per_character = LEXER_FUEL
    limits = guidance.LLParserLimits(
        verbose_errors=False,
        step_max_items=MAX_ITEMS,
        initial_lexer_fuel=fuel + per_character * len(text),
    )
    matcher = guidance.LLMatcher(_tokens_of(guidance, llm), text, log_level=0, limits=limits)
    if not matcher.is_error():
        allowed = np.flatnonzero(_allowed(matcher, llm.config.vocab))
        first = next((int(token) for token in allowed if token not in llm.eos), None)
        trial = matcher.deep_copy()  # some expressions fail at the first token
        if first is not None and not matcher.is_error():
            trial.consume_token(first)
            trial.compute_bitmask()
            matcher = trial if trial.is_error() else matcher
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        if reason.startswith("NoExtension"):
            reason = "no text obeys it"
        remedy = "leave them out" if reason.startswith("Unimplemented") else "correct it"
        raise UserError(f"{grammar.kind} cannot be used: {reason}; {remedy}")
    return Matcher(matcher, llm.config.vocab)


def _tokens_of(guidance: Any, llm: Llm) -> Any:
    """The tokens of a model in llguidance's form, which takes a second to make, once."""
    with _LOCK:
        if llm.tokenizer not in _TOKENS:
            _TOKENS[llm.tokenizer] = guidance.LLTokenizer(
                guidance.TokenizerWrapper(_Tokens(llm)),
                n_vocab=llm.config.vocab,
                eos_token=[*llm.eos],
            )
        return _TOKENS[llm.tokenizer]


_LOCK = threading.Lock()
_TOKENS: WeakKeyDictionary[Tokenizer, Any] = WeakKeyDictionary()


class _Tokens:
    """A tokenizer as llguidance reads it."""

    def __init__(self, llm: Llm) -> None:
        self._tokenizer = llm.tokenizer
        self.eos_token_id, self.bos_token_id = llm.eos[0], llm.tokenizer.bos
        table = llm.tokenizer.table
        self.tokens = [token if len(token) <= MAX_TOKEN else b"" for token in table]
        self._ids = {token: id for id, token in reversed([*enumerate(self.tokens)]) if token}
        self._longest = max(map(len, self._ids))
        self.special_token_ids = sorted(llm.tokenizer.special)
        marks = [re.escape(token.text) for token in llm.tokenizer.added if len(token.text) > 1]
        self._marks = re.compile("|".join(marks) or "(?!)")  # nothing matches (?!)

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text, in which added tokens that are written out are text."""
        decoded, ids, start = text.decode("utf-8", "replace"), [], 0
        for match in self._marks.finditer(decoded):
            cut = match.start() + 1  # within the mark
            ids += self._tokenizer.encode(decoded[start:cut], bos=False, start=False)
            start = cut
        ids += self._tokenizer.encode(decoded[start:], bos=False, start=False)
        spelled = b"".join(self.tokens[id] for id in ids)
        return ids if spelled == text else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Ids of the longest tokens, for tokenizers that change a text, as by its spaces."""
        ids, start = [], 0
        while start < len(text):
            pieces = (text[start : start + size] for size in range(self._longest, 0, -1))
            piece = next((piece for piece in pieces if piece in self._ids), b"")
            if not piece:  # llguidance takes a beginning as well
                break
            ids.append(self._ids[piece])
            start += len(piece)
        return ids


def _compiled(guidance: Any, grammar: Grammar) -> str:
    """The grammar in llguidance's form."""
    kind, value = grammar.kind, grammar.value
    if kind == "json_object":
        value = {"type": "object"}
    if kind == "choice":
        choices = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        if not choices or not all(isinstance(text, str) for text in value):
            raise UserError(f"choice must be a list of texts, got {value!r:.60}; give at least one")
        value = [*value]
    elif kind.startswith("json"):
        value = _schema(value)
    elif not isinstance(value, str) or not value:
        raise UserError(f"{kind} must be a text, got {value!r:.60}; give one")
    text = _text(kind, value)
    if kind == "grammar":
        _check_count(kind, text.count("::="), MAX_RULES, "rules")
    if kind == "regex":
        _check_pattern(text)
    try:
        if kind.startswith("json"):
            return guidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_LAYOUT)
        if kind == "grammar":  # llguidance searches runs of blank lines for a long time
            text = "\n".join(line for line in text.split("\n") if line.strip())
        return guidance.grammar_from(kind, text)
    except ValueError as error:
        raise UserError(f"{kind} cannot be used: {_reason(str(error))}; correct it") from None


def _check_count(
    name: str, count: int, limit: int, noun: str = "characters", remedy: str = "give a smaller one"
) -> None:
    if count > limit:
        raise UserError(f"{name} may have {limit} {noun}, got {count}; {remedy}")


def _check_pattern(pattern: str) -> None:
    name, remedy = "a regular expression", "give a shorter one"
    _check_count(name, len(pattern), MAX_PATTERN, remedy=remedy)


def _text(kind: str, value: Any) -> str:
    """A grammar as text. Raises UserError for what is no JSON, and beyond MAX_SIZE."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"{kind} must be JSON, got {value!r:.60}; correct it") from None
    _check_count(kind, len(text), MAX_SIZE)
    return text


def json_rule(schema: Any) -> str:
    """The JSON that obeys a schema, as a rule of a grammar in Lark's form.

    Raises UserError for what is no schema.
    """
    rule = _schema(schema) | {"x-guidance": JSON_LAYOUT}
    return f"%json {json.dumps(rule, ensure_ascii=False)}"


def _schema(value: Any) -> dict[str, Any]:
    """A schema from a dict, JSON or a class of pydantic, without the words that describe it."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        _check_count("json_schema", len(value), MAX_JSON)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UserError(f"json_schema must be JSON, got {value[:60]!r}; correct it") from None
    if not isinstance(value, dict):
        raise UserError(f"json_schema must be an object, got {value!r:.60}; give a JSON schema")
    try:
        _check_members(value)
        schema = _without_words(value)
        _text("json_schema", schema)
        _check_recursion(schema)
        return schema
    except RecursionError:
        raise UserError("json_schema is nested too deeply; give a flatter schema") from None


def _check_members(value: Any) -> None:
    """Raise UserError for what llguidance would read in another way."""
    if isinstance(value, dict):
        if "x-guidance" in value:
            raise UserError("json_schema must not have x-guidance, got one; leave it out")
        patterns = value.get("patternProperties")
        names = [*patterns] if isinstance(patterns, dict) else []
        for pattern in [value.get("pattern"), *names]:
            if isinstance(pattern, str):
                _check_pattern(pattern)
        for member in value.values():
            _check_members(member)
    elif isinstance(value, list):
        for member in value:
            _check_members(member)
    elif isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise UserError(
            f"numbers in json_schema may be at most 2^53, got {value}; give a text with a pattern"
        )


def _check_recursion(schema: dict[str, Any]) -> None:
    """Raise UserError where every value would contain another without end.

    llguidance takes such a schema, and the answer grows until the parser has no more room. What
    only two schemas of one value require together is not seen.
    """
    nodes, users = {}, {}  # by identity: schemas and lists of choices, and those that need them
    needed: dict[int, int] = {}  # how many parts of each are not known to have a value that ends
    unread: list[Any] = [schema]
    while unread:
        node = unread.pop()
        if id(node) in nodes:
            continue
        parts = node if isinstance(node, list) else _required_parts(node, schema)
        nodes[id(node)] = node
        needed[id(node)] = min(len(parts), 1) if isinstance(node, list) else len(parts)
        for part in parts:
            users.setdefault(id(part), []).append(id(node))
        unread += parts
    ending = [place for place, count in needed.items() if count == 0]
    while ending:
        for place in users.get(ending.pop(), ()):
            needed[place] -= 1
            if needed[place] == 0:
                ending.append(place)
    if needed[id(schema)] > 0:
        endless = (node for place, node in nodes.items() if needed[place] > 0)
        pointer = next(n["$ref"] for n in endless if isinstance(n, dict) and "$ref" in n)
        raise UserError(
            f"json_schema must allow a value that ends, got {pointer!r:.60}, which requires itself "
            "without end; leave it out of required, or allow another value"
        )


def _required_parts(schema: Any, root: Any) -> list[Any]:
    """The schemas, and lists of choices, that a value which ends must obey or contain."""
    if not isinstance(schema, dict):
        return []
    parts = [_target(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
    parts += [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    parts += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    required, properties = schema.get("required"), schema.get("properties")
    if schema.get("type") in ("object", ["object"]):
        properties = properties if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        patterns = schema.get("patternProperties")
        others = [*patterns.values()] if isinstance(patterns, dict) else []
        others.append(schema.get("additionalProperties", True))
        others = [other for other in others if other is not False]  # of any other name
        parts += [properties.get(name, others) for name in required if isinstance(name, str)]
        count = schema.get("minProperties")
        if isinstance(count, int) and count > 0 and not required:
            parts.append([*properties.values(), *others])
    count = schema.get("minItems")
    if schema.get("type") in ("array", ["array"]) and isinstance(count, int):
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):  # of former drafts
            items, first = schema.get("additionalItems"), items
        first = first if isinstance(first, list) else []
        parts += [*first[: max(count, 0)], *[items] * (count > len(first))]
    return parts


def _target(schema: Any, pointer: str) -> Any:
    """What a pointer points to; True, which allows everything, for what is not in the schema."""
    if pointer not in ("", "#") and not pointer.startswith("#/"):
        return True
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and len(name) < 9:
            schema = schema[int(name)] if int(name) < len(schema) else True
        else:
            schema = schema.get(name, True) if isinstance(schema, dict) else True
    return schema


WORDS, VALUES = {"title", "description", "$comment"}, {"const", "enum", "default", "examples"}


def _without_words(schema: Any) -> Any:
    """A schema without titles and descriptions, which are no rules and may be long."""
    if isinstance(schema, list):
        return [_without_words(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: member if name in VALUES else _without_words(member)
        for name, member in schema.items()
        if not (name in WORDS and isinstance(member, str))
    }


def _reason(message: str) -> str:
    """What a message of llguidance says, in one line."""
    first, *lines = (line.strip() for line in message.strip().splitlines())
    why = next((line for line in lines if line.startswith("error:")), "")
    reason = f"{first.removeprefix('panic: ')} {why.removeprefix('error:')}".strip().rstrip(". ")
    reason = reason.replace(COERCE, "use anyOf in place of oneOf")
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


COERCE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(
            "schemas and grammars need llguidance, which is not installed; "
            "pip install 'jaxkv[models]'"
        ) from None
    return llguidance
