"""Tokenize the parts of a corpus, in one process or in several.

    OUT/parts/00000.train, .valid   the tokens of part 0 by split
    OUT/parts/00000.json            its counts; written last, so a part that has it is complete

A part depends on its texts alone. So the tokens are the same for any number of processes, and a run
that was killed continues after its complete parts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer as Coder

from jaxkv.errors import UserError
from jaxkv.files import whole_file
from jaxkv.models.training import data_tokenizer, text_files
from jaxkv.models.training.data import SPLITS, TOKENIZER
from jaxkv.models.training.text_files import ReadSettings, Section, Text

PARTS = "parts"
Part = tuple[Section, ...]
Count = tuple[int, str, int, int]  # a file, a split, and its documents and tokens there


class Tokenizing(NamedTuple):
    """Where parts are written and how: `end` is the token after each document."""

    out: Path
    reading: ReadSettings
    dtype: str
    end: int

    def file(self, number: int, ending: str) -> Path:
        """A file of a part: a split, or `json`."""
        return self.out / PARTS / f"{number:05}.{ending}"

    def counts(self, number: int) -> list[Count] | None:
        """The counts of a complete part, else None."""
        path = self.file(number, "json")
        return json.loads(path.read_text("utf-8")) if path.exists() else None


def tokenize(
    how: Tokenizing, parts: Mapping[int, Part], processes: int, done: Callable[[int], None]
) -> None:
    """Tokenize parts; done: called with the number of each part that is complete.

    Raises UserError for a text that cannot be read, and where a process was ended.
    """
    if processes == 1 or len(parts) <= 1:
        coder = data_tokenizer.read(how.out / TOKENIZER)
        for number, part in parts.items():
            _tokenize_part(coder, how, number, part)
            done(number)
        return
    waiting = iter(parts.items())
    running: dict[connection.Connection, int] = {}

    def give(worker: connection.Connection) -> None:
        for number, part in itertools.islice(waiting, 1):
            worker.send((number, part))
            running[worker] = number

    with _workers(how, min(processes, len(parts))) as workers:
        for worker in workers:
            give(worker)
        while running:
            for worker in connection.wait(list(running)):
                if (error := _result(worker)) is not None:
                    raise error
                done(running.pop(worker))
                give(worker)


def _tokenize_part(coder: Coder, how: Tokenizing, number: int, part: Part) -> None:
    """Write the tokens of a part, and then its counts: documents and tokens by file and split."""
    documents: Counter[tuple[int, str]] = Counter()
    tokens: Counter[tuple[int, str]] = Counter()
    with contextlib.ExitStack() as stack:
        files = {s: stack.enter_context(whole_file(how.file(number, s))) for s in SPLITS}
        for batch in _batches(part, how.reading):
            # The fast variant keeps no offsets: half the time and half the memory.
            texts = [text.text for _, text in batch]
            encoded = coder.encode_batch_fast(texts, add_special_tokens=False)
            for (file, text), encoding in zip(batch, encoded, strict=True):
                ids = [*encoding.ids, how.end] if text.last else encoding.ids
                files[text.split].write(np.asarray(ids, how.dtype).tobytes())
                documents[file, text.split] += text.last
                tokens[file, text.split] += len(ids)
    counts = [[file, split, documents[file, split], tokens[file, split]] for file, split in tokens]
    with whole_file(how.file(number, "json")) as file:
        file.write(json.dumps(counts).encode())


def _batches(part: Part, reading: ReadSettings) -> Iterator[list[tuple[int, Text]]]:
    """The texts of a part with their files, about BLOCK characters at a time."""
    batch: list[tuple[int, Text]] = []
    size = 0
    for section in part:
        for text in text_files.read(section, reading):
            batch.append((section.file, text))
            size += len(text.text)
            if size >= text_files.BLOCK:
                yield batch
                batch, size = [], 0
    yield batch


@contextlib.contextmanager
def _workers(how: Tokenizing, count: int) -> Iterator[list[connection.Connection]]:
    """Processes that tokenize the parts that are sent to them; none is left at the end.

    They share the memory of imported modules, where the system can fork.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__])
        _start_forkserver()
    processes, ends = [], []
    try:
        for _ in range(count):
            parent_end, child_end = context.Pipe()
            ends.append(parent_end)
            processes.append(context.Process(target=_work, args=(how, child_end), daemon=True))
            processes[-1].start()
            child_end.close()  # so that `parent_end` ends with the process
        yield ends
    finally:
        for process, end in zip(processes, ends, strict=False):
            end.close()
            if process.pid is not None:
                process.kill()
                process.join()


def _start_forkserver() -> None:
    """Ctrl-C reaches every process of a terminal, but only this one acts on it."""
    from multiprocessing import forkserver, resource_tracker  # absent on Windows

    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(worker: connection.Connection) -> UserError | OSError | None:
    """The error of a part, if it has one. Raises UserError for a process that was ended."""
    try:
        return worker.recv()
    except (EOFError, ConnectionError):
        raise UserError(
            "a process that tokenizes was ended, most likely for lack of memory; give fewer "
            "--processes; the same command resumes the run"
        ) from None


def _work(how: Tokenizing, parent: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    coder = data_tokenizer.read(how.out / TOKENIZER)
    while True:
        try:
            number, part = parent.recv()
        except EOFError:  # all parts are done
            return
        error = None
        try:
            _tokenize_part(coder, how, number, part)
        except (UserError, OSError) as found:
            error = found
        parent.send(error)


def _end_with_parent() -> None:
    """End this process as soon as the parent was killed, also within a part."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
