"""Questions in a stream: multiple choice (StreamingLLM, Table 5), and numbers (StreamEval).

`questions`: every question was asked after all earlier ones and their right answers, in one stream
under one cache. The answer is the choice with the largest mean log-likelihood of its tokens. A
question in the stream has solved ones before it, and one that is asked alone has none, so two
controls have the same ones: full attention to the whole stream, as far as it fits the trained
context, and full attention to the last tokens, read again for each question. The paper compares
exact matches of a chat model of 7 billion weights.

`stream_eval`: novels were read as streams, and every 200 tokens a sentence names the secret number
of a thing. A question names the thing a set number of tokens after the end of its sentence. An
answer is right if greedy decoding would write it. The gate is full attention to the last 1,024
tokens at most, read again for each sentence. The commits of the records have their commands.
"""

from __future__ import annotations

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Results, above, below, claim, within
from jaxkv.evals.tasks.score import GATE

QUESTION = 40  # tokens of a question and of what it asks about, at most


def answers_table() -> str:
    """Right answers by what the model reads before a question."""
    results = read("questions")["results"]
    titles = {
        "alone": "each question alone",
        "full": f"full attention to the stream (the first {results['questions_of_full']})",
        "reread": f"full attention to the last {results['reread']} tokens, read again",
        "4+252": "`streaming:sinks=4,window=252`",
        "0+256": "`window:window=256`",
    }
    cells = ((title, f"{results['right'][name]['share']:.1%}") for name, title in titles.items())
    caption = (
        f"{results['questions']} questions of ARC-E in a stream of {results['tokens']:,} tokens; "
        f"guessing gives {results['chance']:.0%}."
    )
    return table(("cache", "right answers"), cells, caption)


def distances_past_gate(results: Results) -> list[str]:
    """The distances at which full attention passes the gate."""
    return [key for key, right in results["gate"].items() if right["mean"] >= GATE]


def within_cache(results: Results) -> dict[str, float]:
    """Right answers of streaming minus those of full attention, within the cache."""
    right = results["right"]["streaming"]
    return {
        f"{distance} tokens back": right[distance]["mean"] - results["gate"][distance]["mean"]
        for distance in distances_past_gate(results)
        if int(distance) + QUESTION <= results["cache"]
    }


def beyond_cache(results: Results) -> dict[str, float]:
    """Right answers of streaming beyond the cache."""
    return {
        f"{distance} tokens back": results["right"]["streaming"][distance]["mean"]
        for distance in distances_past_gate(results)
        if int(distance) > results["cache"]
    }


def distances_table() -> str:
    """Right answers by cache and by the tokens since the number."""
    results = read("stream_eval")["results"]
    rows = {f"full attention to at most {results['gate_tokens']:,} tokens": results["gate"]}
    rows |= {f"`{name}`": results["right"][name] for name in results["policies"] if name != "full"}
    heads = ("cache", *(f"{distance} tokens back" for distance in results["gate"]))
    cells = (
        (title, *(f"{row[key]['mean']:.0%}" for key in results["gate"]))
        for title, row in rows.items()
    )
    caption = (
        f"{len(results['texts'])} novels of {results['tokens']:,} tokens with a number every "
        f"{results['every']}; caches of {results['cache']} tokens."
    )
    return table(heads, cells, caption)


TABLES = {"questions": answers_table, "stream_eval": distances_table}
CLAIMS = (
    claim("Table 5, ARC-E, Llama-2-7B-chat: 71.34 against 71.25; window 3.58",
          "Questions in a stream are answered as well as by re-computation; a window alone answers "
          "fewer than full attention", "questions",
          within(lambda r: {"4+252 over re-computation": r["right"]["4+252"]["minus"]["reread"]},
                 by=0.05),
          below(lambda r: {"0+256 over full": r["right"]["0+256"]["minus"]["full"]}),
          seen=[above("right/full/share", GATE)], unit="points"),
    claim("StreamEval, cache 2048: 85.8 % at distance 460, 0 % at 2300",
          "Numbers within the cache are answered as by full attention, within 10 points; beyond it "
          "under 10 %", "stream_eval", above(within_cache, by=-0.1), below(beyond_cache, 0.1),
          seen=[above(beyond_cache, -1)], unit="share"),
)  # fmt: skip
