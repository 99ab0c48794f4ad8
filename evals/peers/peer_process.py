"""Processes that answer requests for measurements, one per case, with their prompts and ratios."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxkv.evals.lib.text import passage
from jaxkv.evals.lib.timing import Variant, ratio
from jaxkv.models.loading.llm import Llm

PAUSE = 0.2  # seconds before a measurement, in which the threads of the last case go to sleep


class PeerProcess:
    """A process that answers requests: a peer with one model, or jaxkv with one policy."""

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(BrokenPipeError):  # it has ended
            self.process.stdin.close()  # its loop ends
        self.process.stdout.close()
        self.process.wait()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request; SystemExit where the process has failed."""
        with suppress(BrokenPipeError):  # reading finds the end, too
            self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name}: {do} failed, as above; nothing is written")
        return json.loads(answer)

    def seconds(self, do: str, **arguments: Any) -> Variant:
        """A variant that asks for one measurement."""

        def run() -> float:
            time.sleep(PAUSE)
            return self.ask(do, **arguments)["seconds"]

        return run


def prompts_of(llm: Llm, batch: int, size: int, longest: int) -> tuple[list[int], list[list[int]]]:
    """The beginning of the passage, and as many prompts of `each` tokens cut from it.

    longest: tokens of the longest prompt that is read alone. SystemExit where the passage is too
    short.
    """
    needed = max(longest, size * batch)
    text = passage(llm, needed)
    if len(text) < needed:
        raise SystemExit(
            f"prompts need {needed:,} tokens, the passage has {len(text):,}; give shorter ones"
        )
    return text, [text[start : start + size] for start in range(0, size * batch, size)]


def ratios(
    seconds: Mapping[str, Sequence[float]], peer: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens a second of each case of jaxkv over each of the peer's, round by round."""
    jaxkv_cases, peer_cases = (
        [name for name in seconds if name.startswith(side)] for side in ("jaxkv", peer)
    )
    return {
        case: {peer_case: ratio(seconds[peer_case], seconds[case]) for peer_case in peer_cases}
        for case in jaxkv_cases
    }
