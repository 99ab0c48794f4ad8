"""How byte-level BPE vocabularies of GGUF files split a text before merging, by name.

A wrong expression loses quality silently: prose hardly shows it, digits and white space do. So a
name that is not in the table is refused, and so is a file without a name.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class PreTokenizer:
    """One way of splitting.

    splits: expressions, each applied to the pieces of the one before. digits: split off every digit
    first; an expression would know the digits of another version of Unicode. ignore_merges: a piece
    that is a token stays whole, whatever its merges. nfc: normalise the text first. adds_bos: where
    a file does not say whether a text begins with BOS.
    """

    splits: tuple[str, ...]
    digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


# tokenizer.ggml.pre -> splitting. Sources: the tokenizer.json of GPT-2, SmolLM2, Llama 3, Qwen2 and
# Mistral NeMo; names and the defaults of BOS as in llama.cpp (src/llama-vocab.cpp).
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((GPT2,), digits=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"),
        PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((QWEN2,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
}
