"""The persistent compilation cache, compiling ahead, and a clock of the seconds spent compiling."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import platform
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np

from jaxkv import __version__, files

VARIABLE = "JAXKV_COMPILATION_CACHE"
CACHE_HIT, CACHE_MISS = (f"/jax/compilation_cache/cache_{end}" for end in ("hits", "misses"))
_AHEAD = "jaxkv-compile-ahead"
STOPPED_EVERY = 0.1  # seconds between questions whether to stop waiting


def enable_compilation_cache() -> None:
    """Switch on JAX's persistent compilation cache, unless the user has set one up already.

    It is in the user's cache folder; JAXKV_COMPILATION_CACHE moves it, `off` switches it off.
    """
    clock(), cache_events()  # they count from now on
    mute_reads_of_programs()
    folder = cache_folder(VARIABLE, "compilations")
    if folder is None or jax.config.jax_compilation_cache_dir:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"jaxkv: no compilation cache: {folder}: {error.strerror}; set {VARIABLE} to another "
            "folder, or to off",
            file=sys.stderr,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default JAX does not store programs that compile in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@functools.cache
def mute_reads_of_programs() -> None:
    """Keep XLA's log off standard error while JAX reads a stored program; jax 0.8.2 to 0.10 only.

    With AVX-512, XLA compiles with LLVM's preferences prefer-no-gather and prefer-no-scatter. The
    loader of these versions takes them for features that the host lacks, and logs 3 kB a program
    that end in SIGILL. The level is that of the process, so errors that XLA logs in other threads
    during a read are lost too. Of the read itself none is: JAX warns of a program that it cannot
    read, and reads none for other features, because the cache key contains those of the host.
    TF_CPP_MIN_LOG_LEVEL=0 shows all.
    """
    if not (0, 8, 2) <= jax.__version_info__ < (0, 11):
        return
    from jax._src import compilation_cache, logging_config
    from jax._src.lib import utils

    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1")  # as jax sets it on import
    level = int(level) if level.isdigit() else 0  # as XLA reads it
    read, lock, reading = compilation_cache.get_executable_and_time, threading.Lock(), 0

    def set_level(change: int) -> None:
        nonlocal reading
        with lock:
            reading += change
            shown = logging_config._tf_cpp_map.get(jax.config.jax_logging_level, level)
            utils.absl_set_min_log_level(3 if reading and shown else shown)

    @functools.wraps(read)
    def read_muted(*arguments: object, **named: object) -> object:
        set_level(1)
        try:
            return read(*arguments, **named)
        finally:
            set_level(-1)

    compilation_cache.get_executable_and_time = read_muted


@functools.cache
def cache_events() -> Counter[str]:
    """The events of this process by name, counted from the first use.

    JAX reports CACHE_HIT when it reads a program, and CACHE_MISS when it stores one.
    """
    counts: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    return counts


def report_unusable_cache(*start: object) -> None:
    """Say on standard error, once per host and version, that stored programs cannot be read.

    start: what decides the programs of this start, such as model and policy. Some hosts reject
    every program that they have stored (jax issue 38445), and then each start compiles all again.
    That is so if an equal start found none, programs as old as that are still there, and this one
    found none. An empty file in the cache folder marks a start that found none. In a folder that
    the user has set up, JAX stores slow programs alone, so nothing is said.
    """
    folder, events = jax.config.jax_compilation_cache_dir, cache_events()
    set_by_user = jax.config.jax_persistent_cache_min_compile_time_secs > 0
    if not folder or set_by_user or events[CACHE_HIT] or not events[CACHE_MISS]:
        return
    jaxlib = version("jaxlib")
    host = platform.node(), jax.__version__, jaxlib, __version__
    equal_start = host, start, jax.default_backend(), os.environ.get("XLA_FLAGS", "")
    marker, told = (
        Path(folder, f"jaxkv-{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}")
        for name, identity in (("start", equal_start), ("told", host))
    )
    with contextlib.suppress(OSError):  # a cache without a folder on this machine, or read-only
        marked = marker.stat().st_mtime_ns if marker.exists() else 0
        # Programs that this start stored are newer than the marker.
        programs = files.stats(Path(folder), "*-cache").values()
        before = any(program.st_mtime_ns <= marked for program in programs)
        marker.touch()
        if not before or told.exists():
            return
        told.touch()
        print(
            f"jaxkv: compiled programs are stored in {folder}, but this machine cannot use them "
            f"again: each start compiles all, this one for {clock().seconds:.0f} s; name a folder "
            f"that no other machine uses ({VARIABLE} or JAX_COMPILATION_CACHE_DIR), or install a "
            f"jaxlib other than {jaxlib} (jax issue 38445)",
            file=sys.stderr,
        )


def cache_folder(variable: str, name: str) -> Path | None:
    """The folder that an environment variable names, None for `off`; else one of the user's."""
    chosen = os.environ.get(variable, "")
    if chosen.lower() in ("off", "0", "no", "false"):
        return None
    return Path(chosen).expanduser() if chosen else user_cache() / "jaxkv" / name


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
        ahead = threading.current_thread().name.startswith(_AHEAD)
        if event.startswith("/jax/core/compile/") and not ahead:
            running.add(time.perf_counter(), duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return running


@dataclass
class Stopwatch:
    """Seconds of some work. compile_seconds: those of compiling, which `seconds` leave out."""

    seconds: float = 0.0
    compile_seconds: float = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside."""
        start, compiled = time.perf_counter(), clock().seconds
        try:
            yield
        finally:
            compiled = clock().seconds - compiled
            self.compile_seconds += compiled
            self.seconds += max(0.0, time.perf_counter() - start - compiled)


class Ahead:
    """Programs being compiled in other threads, for arrays of given shapes.

    A call of such a program compiles nothing once `wait` has returned True. stopped: asked while
    `wait` waits; it then returns False at once.
    """

    # By this process: a program with its shapes, and its compilation until that ends.
    compilations: ClassVar[dict[tuple, Future | None]] = {}

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._running: dict[str, list[Future]] = {}
        self._stopped = stopped

    def compile(self, name: str, program: Callable, *arguments: object) -> None:
        """Begin to compile a jitted program, unless this process has done so before.

        arguments: those of a call; shapes may stand for arrays.
        """
        leaves, tree = jax.tree.flatten(jax.tree.map(_shape, arguments))
        key = (program, tree, *leaves)
        if key not in self.compilations:
            shapes = jax.tree.unflatten(tree, leaves)
            submitted = _threads().submit(lambda: program.lower(*shapes).compile())
            self.compilations[key] = submitted
            submitted.add_done_callback(partial(self._end, key))
        if (future := self.compilations.get(key)) is not None:
            self._running.setdefault(name, []).append(future)

    def _end(self, key: tuple, done: Future) -> None:
        if done.cancelled():
            self.compilations.pop(key, None)
        else:
            self.compilations[key] = None

    @property
    def count(self) -> int:
        """The number of programs whose compilation has not ended."""
        return sum(not future.done() for group in self._running.values() for future in group)

    def wait_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait for all programs; progress: called with (programs compiled, all programs)."""
        futures = [future for group in self._running.values() for future in group]
        for done, _ in enumerate(as_completed(futures), 1):
            if progress is not None:
                progress(done, len(futures))
        for name in list(self._running):
            self.wait(name)

    def cancel(self) -> None:
        """Drop all programs whose compilation has not begun; the others end by themselves."""
        for future in itertools.chain.from_iterable(self._running.values()):
            future.cancel()
        self._running.clear()

    def wait(self, name: str) -> bool:
        """Wait for all programs of this name; the clock counts the wait and not the threads.

        An error of a compilation is raised by the call of the program.
        """
        running, start = self._running.get(name, ()), time.perf_counter()
        if not running:
            return True
        while running and not self._stopped():
            _, running = wait(running, timeout=STOPPED_EVERY)
        now = time.perf_counter()
        clock().add(now, now - start)
        if running:  # they stay, so that `cancel` drops them
            return False
        del self._running[name]
        return True


def is_compiling() -> bool:
    """Whether another thread compiles a program, which cannot be ended."""
    return any(future is not None and future.running() for future in Ahead.compilations.values())


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix=_AHEAD)


def _shape(leaf: object) -> object:
    """The shape of an array or scalar; other leaves are static arguments and stay."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    committed = isinstance(leaf, jax.Array) and leaf.committed
    sharding = leaf.sharding if committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
