"""A text to read: the beginning of a novel that is shipped beside the default model."""

from __future__ import annotations

from jaxkv.models.loading.llm import DEFAULT, Llm

# "The Hound of the Baskervilles" (1902), in the public domain. The default model has not seen it.
PASSAGE = DEFAULT / "passage.txt"


def passage(llm: Llm, max_tokens: int) -> list[int]:
    """The first `max_tokens` tokens of the passage. Prints a line if the tokenizer makes fewer."""
    ids = llm.tokenizer.encode(PASSAGE.read_text("utf-8"))
    if len(ids) < max_tokens:
        print(f"all {len(ids):,} tokens of the passage are used, {max_tokens:,} were requested")
    return ids[:max_tokens]
