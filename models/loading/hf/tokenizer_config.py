"""What a model folder says about its tokenizer beside the vocabulary, as transformers reads it.

Versions of transformers differ in some fields. docs/decisions/text.md says what is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.loading.added_tokens import FLAGS, AddedToken
from jaxkv.models.loading.hf.folder import read_json

# Special tokens by the order in which transformers gives ids to those that the vocabulary lacks.
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
# Every field of tokenizer_config.json that may change the ids of a prompt is in NAMED, in LISTS, or
APPLIED = ("add_bos_token", "added_tokens_decoder", "add_prefix_space", "legacy", "chat_template")
# supported with one value, as is its absence, or
REFUSED = {"split_special_tokens": False, "fix_mistral_regex": False, "sp_model_kwargs": {},
           "do_lower_case": False, "remove_space": False, "keep_accents": True}  # fmt: skip
# without effect: `add_eos_token` would end the prompt that an answer continues.
UNUSED = ("add_eos_token", "clean_up_tokenization_spaces", "use_default_system_prompt", "errors",
          "padding_side", "truncation_side", "model_max_length", "model_input_names")  # fmt: skip


@dataclass(frozen=True)
class TokenizerConfig:
    """bos, eos: ids. adds_bos, adds_space, legacy: None where the folder does not say."""

    added: tuple[AddedToken, ...]
    bos: int | None
    eos: tuple[int, ...]
    adds_bos: bool | None
    adds_space: bool | None
    legacy: bool | None


def read_tokenizer_config(
    folder: Path, id_of: Callable[[str], int | None], vocabulary: Iterable[AddedToken], size: int
) -> TokenizerConfig:
    """The configuration of a tokenizer.

    id_of: the id of a token of the vocabulary. vocabulary: its added tokens. size: its length,
    from which on new tokens get ids. Added tokens without a row in the embedding are left out.
    Raises UserError for a field that is not supported.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    for name, value in REFUSED.items():
        if config.get(name) not in (None, value):
            raise UserError(
                f"{path}: {name} must be {value} or absent, got {config[name]!r:.60}; use another "
                "model"
            )
    added = {token.text: token for token in vocabulary}
    names = read_json(folder / "special_tokens_map.json") | config
    special = list(_special(names, path))
    for token in _declared(folder, config, {text for text, _ in special}):
        ids = id_of(token.text), size
        vocabulary_id = next(i for i in ids if i is not None)
        if vocabulary_id != token.id:
            raise UserError(
                f"{path}: {token.text!r:.60} must have its id in the vocabulary, {vocabulary_id}, "
                f"got {token.id}; download it again"
            )
        added[token.text] = token
        size = max(size, token.id + 1)
    for text, flags in special:
        if text not in added:
            i = id_of(text)
            added[text] = AddedToken(text, size if i is None else i, **flags)
            size += i is None
    rows = embedding_rows(folder)
    ids = {text: token.id for text, token in added.items()}

    def id_with_row(text: str) -> int | None:
        i = ids.get(text, id_of(text))
        return i if i is not None and i < rows else None

    return TokenizerConfig(
        tuple(token for token in added.values() if token.id < rows),
        *_ends(folder, names, id_with_row),
        *(_flag(config, name, path) for name in ("add_bos_token", "add_prefix_space", "legacy")),
    )


def embedding_rows(folder: Path) -> int | float:
    """The number of ids that the model of a folder reads, infinite where config.json is absent.

    Many folders name a padding token that the model lacks.
    """
    rows = read_json(folder / "config.json").get("vocab_size")
    return rows if isinstance(rows, int) else math.inf


def _special(names: Mapping[str, Any], path: Path) -> Iterable[tuple[str, dict[str, bool]]]:
    """Text and flags of each special token."""
    for value in [names.get(name) for name in NAMED]:
        if text := content(value):
            yield text, _flags(value)
    for name in LISTS:
        values = names.get(name) or []
        for value in values.values() if isinstance(values, dict) else values:
            if text := content(value):
                yield text, _flags(value)


def _declared(
    folder: Path, config: Mapping[str, Any], special: Iterable[str]
) -> Iterable[AddedToken]:
    """The tokens of added_tokens_decoder by id, or else those of added_tokens.json."""
    path, entries = folder / "tokenizer_config.json", config.get("added_tokens_decoder")
    if entries is None:
        path, by_text = folder / "added_tokens.json", read_json(folder / "added_tokens.json")
        entries = {
            i: {"content": text, "special": text in special, "normalized": text not in special}
            for text, i in by_text.items()
        }
    try:
        tokens = [
            AddedToken(entry["content"], int(i), bool(entry.get("special", False)), **_flags(entry))
            for i, entry in entries.items()
        ]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise UserError(f"{path}: added tokens must be texts with ids; download it again") from None
    wrong = next((token for token in tokens if not token.text or token.id < 0), None)
    if wrong is not None:
        raise UserError(f"{path}: added token {wrong.id} is empty or below 0; download it again")
    return sorted(tokens, key=lambda token: token.id)


def content(value: Any) -> str | None:
    """The text of a special token, which is a string or an object with its flags."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _flags(value: Any) -> dict[str, bool]:
    return {name: bool(value.get(name, False)) for name in FLAGS} if isinstance(value, dict) else {}


def _flag(config: Mapping[str, Any], name: str, path: Path) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path}: {name} must be true or false, got {value!r:.60}; correct it")
    return value


def _ends(
    folder: Path, tokens: Mapping[str, Any], id_of: Callable[[str], int | None]
) -> tuple[int | None, tuple[int, ...]]:
    """BOS and EOS ids: the tokenizer's own files first, else the ids in the model's config."""
    model = read_json(folder / "config.json")
    model |= read_json(folder / "generation_config.json")

    def ids(name: str) -> list[int]:
        if f"{name}_token" in tokens:
            text = content(tokens[f"{name}_token"])
            i = None if text is None else id_of(text)
            return [] if i is None else [i]
        value = model.get(f"{name}_token_id")
        return value if isinstance(value, list) else [] if value is None else [value]

    return next(iter(ids("bos")), None), tuple(ids("eos"))
