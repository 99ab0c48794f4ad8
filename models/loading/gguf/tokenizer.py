"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.loading import sentencepiece
from jaxkv.models.loading.added_tokens import gguf_splitter
from jaxkv.models.loading.chat import Chat
from jaxkv.models.loading.gguf.config import ENDS, ends, token_id, tokens_of
from jaxkv.models.loading.gguf.header import Header
from jaxkv.models.loading.sentencepiece import ADDED, NORMAL, USER_DEFINED
from jaxkv.models.loading.tensors import corrupt
from jaxkv.models.loading.tokenizer import Tokenizer, tokenizer_of, tokenizer_of_sentencepiece

PREFIX = "tokenizer.ggml."
# Special tokens that a chat template may name: its name -> that in the metadata.
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Fields of the tokenizer that are applied, and those without effect on the ids of a prompt: names
# of other tokens, and what comes after a text. Any other field is refused.
APPLIED = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token",
    "add_space_prefix", "remove_extra_whitespaces",
    *(f"{name}_token_id" for name in (*ENDS, *NAMED.values())),
)  # fmt: skip
UNUSED = (
    "token_type_count", "add_eos_token", "add_sep_token",
    *(f"{name}_token_id" for name in ("seperator", "separator", "cls", "mask", "prefix", "suffix",
                                      "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad",
                                      "fim_rep", "fim_sep")),
)  # fmt: skip

# How byte-level BPE vocabularies split a text before merging. A wrong expression loses quality
# silently: prose hardly shows it, digits and white space do. So a name that is not in
# PRE_TOKENIZERS is refused, and so is a file without a name.
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# The expressions of Llama 3 and Qwen2 differ in the digits that stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
QWEN2 = _WORDS.replace("DIGITS", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way of splitting.

    splits: expressions, each applied to the pieces of the one before. digits: split off every digit
    first; an expression would know the digits of another version of Unicode. ignore_merges: a piece
    that is a token stays whole, whatever its merges. falcon: split off punctuation before, and
    digits, in threes, after bytes became letters, of which some are digits. nfc: normalise the text
    first. adds_bos: where a file does not say whether a text begins with BOS.
    """

    splits: tuple[str, ...]
    digits: bool = False
    falcon: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


# tokenizer.ggml.pre -> splitting. Sources: the tokenizer.json of GPT-2, SmolLM2, Llama 3, Qwen2,
# Falcon and Mistral NeMo; names and the defaults of BOS as in llama.cpp (src/llama-vocab.cpp).
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "exaone4"), PreTokenizer((GPT2,))),
    **dict.fromkeys(("smollm", "refact", "command-r"), PreTokenizer((GPT2,), digits=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((O200K,))),
    "falcon": PreTokenizer((GPT2,), falcon=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"),
        PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((QWEN2,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
}


def read_tokenizer(header: Header) -> Tokenizer:
    """The tokenizer; raises UserError for an unsupported vocabulary or pre-tokenizer."""
    kind = header.get(PREFIX + "model", str)
    if kind not in KINDS:
        raise UserError(
            f"{header.path}: unsupported {PREFIX}model {kind!r:.60}; supported: gpt2 "
            "(byte-level BPE), llama (SentencePiece BPE)"
        )
    for key, value in header.fields.items():
        name = key.removeprefix(PREFIX)
        if name != key and value and name not in (*APPLIED, *UNUSED):
            raise UserError(
                f"{header.path}: unsupported field {key}, got {value!r:.60}; use a file without it"
            )
    return KINDS[kind](header)


def read_chat(header: Header) -> Chat:
    """The chat template, with the special tokens that it may name."""
    tokens = tokens_of(header)
    ids = {name: token_id(header, gguf_name) for name, gguf_name in NAMED.items()}
    named = tuple((name, tokens[i]) for name, i in ids.items() if i is not None)
    return Chat(header.get("tokenizer.chat_template", str), named)


def _byte_level(header: Header) -> Tokenizer:
    """Byte-level BPE, built with the `tokenizers` package."""
    try:
        from tokenizers import AddedToken, decoders, models, normalizers
        from tokenizers import Tokenizer as Backend
    except ImportError:
        raise UserError(
            f"reading {header.path} needs the package tokenizers (pip install tokenizers)"
        ) from None
    pre, tokens, types = _pre_tokenizer(header), tokens_of(header), _types(header)
    try:
        backend = Backend(
            models.BPE(
                vocab={token: i for i, token in enumerate(tokens)},
                merges=_merges(header),
                ignore_merges=pre.ignore_merges,
            )
        )
    except UserError:
        raise
    except Exception as error:  # the package raises bare Exception for every bad vocabulary
        why = f"its merges do not fit its tokens ({' '.join(str(error).split()):.100})"
        raise corrupt(header.path, why) from None
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitter(pre)
    backend.decoder = decoders.ByteLevel()
    # All are matched whole in a text; user-defined ones decode to their text.
    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in ADDED and token
        ]
    )
    bos = token_id(header, "bos")
    front = _front(header, bos, pre.adds_bos)
    return tokenizer_of(backend, header.path, bos, ends(header), front, gguf_splitter)


def splitter(pre: PreTokenizer) -> Any:
    """The pre-tokenizer as one of the `tokenizers` package; it also maps bytes to letters."""
    from tokenizers import Regex, pre_tokenizers

    isolate = lambda split: pre_tokenizers.Split(Regex(split), "isolated")
    before = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    after = []
    if pre.falcon:
        before = [pre_tokenizers.Punctuation("contiguous")]
        after = [pre_tokenizers.Digits(individual_digits=False), isolate("[0-9][0-9][0-9]")]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*before, *map(isolate, pre.splits), letters, *after])


def _sentencepiece(header: Header) -> Tokenizer:
    """SentencePiece BPE, encoded by the `sentencepiece` package."""
    tokens, types = tokens_of(header), _types(header)
    scores = _per_token(header, "scores", header.need(PREFIX + "scores", list[float]))
    add_space = header.get(PREFIX + "add_space_prefix", bool, True)
    collapse = header.get(PREFIX + "remove_extra_whitespaces", bool, False)
    model = sentencepiece.serialise(tokens, scores, types, add_space, collapse)
    bos = token_id(header, "bos")
    return tokenizer_of_sentencepiece(
        header.path,
        model,
        sentencepiece.added_pieces(model),
        bos=bos,
        eos=ends(header),
        front=_front(header, bos, adds_bos=True),
        adds_space=add_space,
        split=gguf_splitter,
    )


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _pre_tokenizer(header: Header) -> PreTokenizer:
    name = header.get(PREFIX + "pre", str)
    if name not in PRE_TOKENIZERS:
        reason = (
            "missing field tokenizer.ggml.pre, without which texts are split wrongly; use a file "
            "that was converted with a current llama.cpp"
            if name is None
            else f"unsupported pre-tokenizer {name!r:.60}"
        )
        raise UserError(f"{header.path}: {reason}; supported: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _merges(header: Header) -> list[tuple[str, str]]:
    merges = header.need(PREFIX + "merges", list[str])
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if wrong is not None:
        why = f"{PREFIX}merges must be pairs of tokens with a space, got {merges[wrong]!r:.60}"
        raise corrupt(header.path, why)
    return pairs


def _types(header: Header) -> list[int]:
    """The type of every token; all are normal where the file does not say."""
    types = header.get(PREFIX + "token_type", list[int], [NORMAL] * len(tokens_of(header)))
    return _per_token(header, "token_type", types)


def _per_token(header: Header, name: str, values: list) -> list:
    if len(values) != (size := len(tokens_of(header))):
        why = f"{PREFIX}{name} must have one entry per token, {size}, got {len(values)}"
        raise corrupt(header.path, why)
    return values


def _front(header: Header, bos: int | None, adds_bos: bool) -> tuple[int, ...]:
    """The ids before a text; adds_bos: the rule where the file does not say."""
    adds_bos = header.get(PREFIX + "add_bos_token", bool, adds_bos)
    return (bos,) if adds_bos and bos is not None else ()
