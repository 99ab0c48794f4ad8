"""An engine without a model, and a tokenizer of bytes: the prompt contains the answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle, pairwise, repeat
from types import SimpleNamespace

from jaxkv.errors import UserError
from jaxkv.models.generation.serving import Language
from jaxkv.models.loading.chat import Chat
from jaxkv.models.loading.tokenizer import Tokenizer
from jaxkv.serve.engine.request import Listener, Outcome, Overloaded, Request, ScoredToken

BOS, EOS, WIDE, VOCAB = 256, 257, 258, 259
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)


def language(template: str | None = None) -> Language:
    """A language with a token per byte, a BOS, an EOS, and one token that is a page long."""
    table = (*(bytes([byte]) for byte in range(256)), b"<s>", b"</s>", b"wide " * 1000)

    def ids_of(text: str, start: bool = True, separator: str = "") -> list[int]:
        text = text.replace(separator, "")
        head = [BOS] if text.startswith("<s>") else []
        return [*head, *text.removeprefix("<s>").encode()]

    tokenizer = Tokenizer(ids_of, table, frozenset({BOS, EOS}), BOS, (EOS,), (BOS,))
    chat = Chat(template, (("bos_token", "<s>"),))
    config = SimpleNamespace(vocab=VOCAB)
    llm = SimpleNamespace(tokenizer=tokenizer, chat=chat, eos=(EOS,), config=config)
    return Language(llm, "bytes", 1)


def logprob(before: int, token: int) -> float:
    """The log probability of a token: a small whole number, so that sums are exact."""
    return -float(1 + (7 * before + token) % 13)


def scored(before: int, token: int, top: int | None) -> ScoredToken:
    if top is None:
        return ScoredToken(token)
    best = sorted(range(WIDE), key=lambda candidate: -logprob(before, candidate))[:top]
    return ScoredToken(token, logprob(before, token), tuple((t, logprob(before, t)) for t in best))


def script(request: Request) -> Iterator[int]:
    """The tokens of an answer: the prompt's text after `|` and an EOS.

    Without a `|` the answer is endless: it repeats the seed, or one word if decoding is greedy.
    """
    prompt = bytes(token for token in request.tokens if token < 256)
    _, bar, answer = prompt.partition(b"|")
    if bar:
        return chain(answer.removesuffix(b"\n").removesuffix(b"[assistant]"), repeat(EOS))
    if b"wide" in prompt:
        return repeat(WIDE)
    word = "la " if request.sampling.temperature == 0 else f"{request.seed} "
    return cycle(word.encode())


@dataclass(eq=False)
class FakeHandle:
    request: Request
    listener: Listener
    tokens: Iterator[int]
    came: float = field(default_factory=time.monotonic)
    generated: list[int] = field(default_factory=list)
    cached: int = 0
    cancelled: bool = False


class FakeEngine:
    """An engine that fails at the third token of prompts with `!fail`, and refuses `!full`.

    pause: seconds between steps. ended: the outcomes so far.
    """

    def __init__(self, max_batch: int = 4, max_len: int | None = 100_000, pause: float = 0.0):
        self.max_batch, self.max_len = max_batch, max_len
        self.vocab, self.pause = VOCAB, pause
        self.healthy = True
        self.handles: list[FakeHandle] = []
        self.requests: list[Request] = []
        self.ended: list[Outcome] = []
        self._seen: set[tuple] = set()
        self._news = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, request: Request, listener: Listener) -> FakeHandle:
        size = len(request.tokens) + request.max_new_tokens
        if self.max_len is not None and size > self.max_len:
            raise UserError(f"max_len is {self.max_len} tokens, got more; shorten it")
        prompt = bytes(token for token in request.tokens if token < 256)
        if b"!full" in prompt:
            raise Overloaded("64 requests wait", 7.2)
        handle = FakeHandle(request, listener, script(request))
        with self._news:
            key = (request.salt, request.tokens)
            handle.cached = len(request.tokens) - 1 if key in self._seen else 0
            self._seen.add(key)
            self.handles.append(handle)
            self.requests.append(request)
            self._news.notify()
        return handle

    def cancel(self, handle: FakeHandle) -> None:
        with self._news:
            handle.cancelled = True
            self._news.notify()

    def metrics(self) -> dict:
        return {
            "running": len(self.handles), "waiting": 0, "waiting_tokens": 0, "batch_size": 4,
            "cache_usage": 0.25,
            "bytes_of_weights": 30, "bytes_of_sequences": 20, "bytes_of_prefixes": 10,
            "prefix_entries": 8, "prefix_entries_stored": 3, "prefix_entries_in_use": 1,
            "prefix_queries": 100, "prefix_hits": 40, "evictions": 1,
            "compilations": 5, "misses": {"cold": 50, "tail": 10}, "step_tokens": 70,
            "step_sizes": [("1", 2), ("16", 6), ("+Inf", 7)], "generation_tokens": 17,
            "host_entries": 9, "host_entries_stored": 5, "demotions": 6, "promotions": 1,
            "disk_entries": 12, "disk_bytes": 3000, "disk_entries_waiting": 2, "disk_hits": 7,
            "disk_writes": 13, "disk_evictions": 1, "disk_failures": 4, "disk_lost": 8,
        }  # fmt: skip

    def start(self) -> FakeEngine:
        self._thread.start()
        return self

    def stop(self) -> None:
        with self._news:
            self._stopping = True
            self._news.notify()
        self._thread.join()
        for handle in list(self.handles):
            self._end(handle, "cancelled")

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._stopping or self.handles)
                if self._stopping:
                    return
                running = self.handles[: self.max_batch]
            for handle in running:
                self._write(handle)
            time.sleep(self.pause)

    def _write(self, handle: FakeHandle) -> None:
        request, listener = handle.request, handle.listener
        prompt, top = list(request.tokens), request.logprobs
        if handle.cancelled:
            return self._end(handle, "cancelled")
        if request.echo and not handle.generated:
            pairs = pairwise(prompt)
            listener.prompt([ScoredToken(prompt[0]), *(scored(*pair, top) for pair in pairs)])
        if len(handle.generated) == request.max_new_tokens:
            return self._end(handle, "length")
        if len(handle.generated) == 2 and b"!fail" in bytes(t for t in prompt if t < 256):
            return self._end(handle, "error", "the model's logits are not finite")
        token = next(handle.tokens)
        before = [*prompt, *handle.generated][-1]
        handle.generated.append(token)
        if listener.token(scored(before, token, top)):
            return self._end(handle, "stop")
        if token in request.eos:
            return self._end(handle, "eos")
        if len(handle.generated) == request.max_new_tokens:
            return self._end(handle, "length")

    def _end(self, handle: FakeHandle, reason: str, error: str = "") -> None:
        self.handles.remove(handle)
        size, seconds = len(handle.request.tokens), time.monotonic() - handle.came
        first = seconds if handle.generated else None
        new = len(handle.generated)
        read = size - handle.cached
        outcome = Outcome(reason, size, handle.cached, new, 0.0, first, seconds, read, error)
        self.ended.append(outcome)
        with contextlib.suppress(Exception):  # a failing listener affects only its own request
            handle.listener.done(outcome)
