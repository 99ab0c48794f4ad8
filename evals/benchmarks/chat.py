"""Chat on SmolLM2-135M: seconds from each message to the first text of its answer.

Every chat is a new process. The first message is there when it starts, so its seconds contain
imports, loading and compilation. A cold chat has an empty compilation cache; the chat after it has
the cache that the cold one filled. The fourth message is a page long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from time import perf_counter

import numpy as np

from jaxkv.evals.benchmarks.startup import COMMAND, environment
from jaxkv.evals.lib.record import ROOT, Record, make_parser, read, run_command, spread
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.text import PASSAGE
from jaxkv.evals.lib.verdict import Statement, within
from jaxkv.models.loading import smollm2

PAGE = 2_000  # letters of the long message
END = "tokens/s"  # the line after an answer, on standard error


def main() -> None:
    parser = make_parser("jaxkv.evals.benchmarks.chat", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="write to out/")
    options = parser.parse_args()
    record = Record("chat", [smollm2.fetch(), PASSAGE], quick=options.quick)
    record.finish(measure(smollm2.NAME, messages(), options.rounds))


def messages() -> list[str]:
    page = " ".join(PASSAGE.read_text("utf-8")[:PAGE].split())
    return ["Hello!", "Who wrote the play Hamlet?", "Tell me a short story about a lighthouse.",
            f"What happens here? {page}", "Why?", "Thank you."]  # fmt: skip


def measure(model: str, asked: list[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Of each message, the seconds in a cold and in a warm chat."""
    seconds: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for chats in seconds.values():
                chats.append(chat(model, asked, folder))
        print(f"chat: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        name: [spread(turn) for turn in np.transpose(chats).tolist()]
        for name, chats in seconds.items()
    }


def chat(model: str, asked: list[str], folder: str) -> list[float]:
    """The seconds of every message. folder: folder of the compilation cache."""
    command = [*COMMAND, "chat", "--model", model, "--max-new-tokens", "24", "--temperature", "0"]
    seconds, start = [], perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(folder), bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        for message in asked:
            process.stdin.write(message.encode() + b"\n")
            first = process.stdout.read(1)
            seconds.append(perf_counter() - start)
            if not first or not any(END in line.decode() for line in process.stderr):
                raise SystemExit(f"{' '.join(command[1:])} ended in turn {len(seconds)}")
            os.read(process.stdout.fileno(), 1 << 16)  # the rest of the answer, which is short
            start = perf_counter()
        process.stdin.close()
    return seconds


def table() -> str:
    """Seconds to the first text, by compilation cache and message."""
    lines = table_head("compilation cache", "from the command", "short message", "page")
    for label, seconds in zip(("empty", "filled"), read("chat")["results"].values(), strict=True):
        cells = (ranged(seconds[turn], "median", ".2f") for turn in (0, 1, 3))
        lines.append(table_row(label, *cells))
    return page_table(lines)


TABLES = {"chat": table}
STATEMENTS = (
    Statement("docs/decisions/compilation.md", "no later turn compiles", "chat",
              [within(f"cold/{turn}", f"warm/{turn}", by=0.05, sure=False)
               for turn in range(1, 6)]),
)  # fmt: skip


if __name__ == "__main__":
    run_command(main)
