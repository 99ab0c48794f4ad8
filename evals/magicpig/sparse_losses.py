"""Losses of sparse attention after prompts of a real model, at equal shares of the keys.

The beginning of each text is a prompt, which is read exactly. The tokens after it are scored by
teacher forcing; their queries attend to both ends of the prompt and to a share of the keys between.
K and L of MagicPIG are chosen on the tokens of the same texts after those.
"""

from __future__ import annotations

from jaxkv import models
from jaxkv.evals.lib.record import Record
from jaxkv.evals.lib.text import ask_for_texts, tokens_of
from jaxkv.evals.magicpig.sparse import SHARES, ScoredText, of_text

PROMPT, SCORED = 2_048, 256  # tokens


def main() -> None:
    ask = ask_for_texts("jaxkv.evals.magicpig.sparse_losses", __doc__)
    ask.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    ask.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    ask.add_argument("--seeds", type=int, default=1, help="of methods that draw")
    given = ask.parse_args()
    if len(given.texts) < 2:
        ask.error("--texts must name at least 2 files, got 1; intervals are over texts")
    llm = models.load(given.model, "float32")
    size = given.prompt + SCORED + 1
    read = {path: tokens_of(llm, path, 2 * size)[0] for path in given.texts}
    short = [path.stem for path, ids in read.items() if len(ids) < 2 * size]
    if short:
        ask.error(f"--texts must have {2 * size} tokens, {', '.join(short)} has fewer; give others")
    stretches, after = ([ids[at : at + size] for ids in read.values()] for at in (0, size))
    text = ScoredText(llm, given.texts, stretches, after, given.prompt)
    record = Record(
        "sparse_135m", [*llm.files, *given.texts], list(range(given.seeds)), given.quick
    )
    record.finish({"perplexity": {llm.name: of_text(text, given.shares, {}, given.seeds)}})


if __name__ == "__main__":
    main()
