"""The persistent compilation cache, and a clock of the seconds spent compiling."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from pathlib import Path

import jax

VARIABLE = "JAXKV_COMPILATION_CACHE"


def enable_compilation_cache() -> None:
    """Switch on JAX's persistent compilation cache, unless the user has set one up already.

    It is in the user's cache folder; JAXKV_COMPILATION_CACHE moves it, `off` switches it off.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() in ("off", "0", "no", "false") or jax.config.jax_compilation_cache_dir:
        return
    folder = Path(chosen).expanduser() if chosen else user_cache() / "jaxkv" / "compilations"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"jaxkv: no compilation cache: {folder}: {error.strerror}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default JAX does not store programs that compile in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def user_cache() -> Path:
    """The folder for files that programs of this user can make again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))


class Clock:
    """Seconds that this process has spent tracing and compiling, from JAX's monitoring.

    JAX reports a nested trace by itself and again within the outer one. The clock therefore counts
    the union of the reported time spans.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: deque[tuple[float, float]] = deque(maxlen=10_000)

    def add(self, end: float, duration: float) -> None:
        """Count a span that ended at `end`, in seconds; spans nested in it were added before."""
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
    """The clock of this process; it counts from its first use."""
    running = Clock()

    def listen(event: str, duration: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            running.add(time.perf_counter(), duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return running
