"""The text that is shipped with the evals: the beginning of a novel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.models.llm import Llm

# "The Hound of the Baskervilles" (1902), in the public domain. The default model has not seen it.
PASSAGE = Path(__file__).resolve().parents[1] / "passage.txt"


def passage(llm: Llm, most: int) -> list[int]:
    """The first `most` tokens of the passage. Prints a line if the tokenizer makes fewer."""
    ids = llm.tokenizer.encode(PASSAGE.read_text("utf-8"))
    if len(ids) < most:
        print(f"all {len(ids):,} tokens of the passage are used, {most:,} were requested")
    return ids[:most]
