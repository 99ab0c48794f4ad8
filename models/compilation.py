"""Compilation: kept from one start to the next, and timed so that it can be shown."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from pathlib import Path

import jax

VARIABLE = "JAXKV_COMPILATION_CACHE"


def keep_compilations() -> None:
    """Switch on JAX's persistent compilation cache, unless the user has set one up already.

    It lies in the user's cache folder; JAXKV_COMPILATION_CACHE moves it, `off` switches it off.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() in ("off", "0", "no", "false") or jax.config.jax_compilation_cache_dir:
        return
    folder = Path(chosen).expanduser() if chosen else _user_cache() / "jaxkv" / "compilations"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"jaxkv: compilations are not kept: {folder}: {error.strerror}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX's own thresholds keep nothing that compiles in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def small_steps() -> dict[str, object]:
    """Compiler options for a loop of many small operations.

    By default XLA:CPU hands independent operations to other threads. In a step of a small model
    each takes well under a microsecond, less than handing it over: without, a decode step of a
    260 K model is a third faster, and that of a large one is as it was.
    """
    if jax.default_backend() != "cpu":
        return {}
    if jax.__version_info__ >= (0, 10):
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def _user_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))


class Clock:
    """Seconds this process has spent tracing and compiling, from JAX's own monitoring.

    A function that is traced inside another is told of by itself and counts in the other's time
    too, so what counts is the time in which any of it went on.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: deque[tuple[float, float]] = deque(maxlen=10_000)

    def add(self, end: float, duration: float) -> None:
        """Something that took so long has ended; what it holds has ended before it."""
        begin = end - duration
        while self._spans and self._spans[-1][0] >= begin:
            first, last = self._spans.pop()
            self.seconds -= last - first
        if self._spans:
            begin = max(begin, self._spans[-1][1])
        self._spans.append((begin, end))
        self.seconds += end - begin


@functools.cache
def clock() -> Clock:
    """The process's clock; counts from its first use."""
    running = Clock()

    def listen(event: str, duration: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            running.add(time.perf_counter(), duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return running
