"""Settings for all tests: eight CPU devices, strict promotion, shape checks, a compilation cache.

Tests marked `parity`, `router`, `tpu_check`, `gpu_check` or `real_model` are skipped, with the
reason, where their packages are absent. `--must-run parity` makes that skip an error. Tests of the
real model may be skipped where it is neither cached nor downloadable. A run ends with the CPU
seconds of each tier.
"""

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import pytest

NEEDS = {
    "parity": ("torch", "transformers"),
    "router": ("vllm_router",),
    "tpu_check": ("libtpu",),
    "gpu_check": ("jax_cuda12_plugin",),
    "real_model": ("gguf",),
}
INSTALL = {  # what brings the packages of a marker
    "parity": "--group peers",
    "router": "--group peers",
    "tpu_check": "-e '.[tpu-check]'",
    "gpu_check": "-e '.[gpu-check]'",
    "real_model": "-e '.[models]'",
}
# Compiling takes most of the time of tests. These flags reduce it by more than half.
COMPILE_FAST = (
    "xla_backend_optimization_level=0",
    "xla_cpu_use_fusion_emitters=false",
    "xla_cpu_parallel_codegen_split_count=1",
)
# The compilation cache, shared by all tests, processes, runs and clones: CI tests a new clone.
COMPILED = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxkv" / "tests"
MAX_COMPILED = 1 << 30  # bytes
DURATIONS = COMPILED.with_name("test_seconds.json")  # of each test in earlier runs
NO_MODEL = "no real model: "
NO_SHARED = "../shared/data is absent: the test model and stories are not redistributable"


def set_environment():
    """Set what jax and libtpu read at import. Values that are already set stay."""
    cpu = os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    if "force_host_platform_device_count" not in flags:
        flags += " --xla_force_host_platform_device_count=8"
    # evals.correctness.agreement sets the default optimization level itself. libtpu does not know
    # flags of XLA:CPU.
    if cpu and "backend_optimization_level" not in flags:
        flags += "".join(f" --{flag}" for flag in COMPILE_FAST if xla_has_flag(flag))
    os.environ["XLA_FLAGS"] = flags.strip()
    # Several processes share a GPU, and commands print nothing about its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAXKV_COMPILATION_CACHE", "off")
    os.environ.setdefault("JAXKV_WEIGHT_CACHE", "off")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    if cpu:  # use libtpu as a compiler: do not search for a TPU, share the library
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def xla_has_flag(flag):
    """Whether this jaxlib has that flag of XLA; an unknown flag would end the process.

    The name must be a whole string of the library: a removed flag may be part of another name.
    """
    name = b"\0%b\0" % flag.partition("=")[0].encode()
    for library in Path(find_spec("jaxlib").origin).parent.glob("*.so"):
        with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            if content.find(name) >= 0:
                return True
    return False


def enable_interrupts():
    """Enable Ctrl-C, which some tests send. Shells disable it for background processes."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def collect_seldom():
    """Let Python look for unreachable cycles seldom: traced programs are many objects that stay.

    484 tests of policies and of the engine on two cores: 107, 109 s before, 102, 102 s with it.
    """
    gc.set_threshold(100_000, 50, 1000)


def check_memory_maps() -> Iterator[None]:
    """Clears compiled programs before the process has too many memory maps; take one step a test.

    A test adds up to 6,300 maps, and 20 tests in a row added 21,000. Counting 30,000 maps takes
    50 ms, so the count decides how many tests may run before the next one. Maps that stay belong to
    programs in use: to clear those again would only compile them again.
    """
    from jaxkv.evals.lib import memory_maps

    max_maps = 40_000
    while True:
        memory_maps.release(max_maps)
        held = memory_maps.count()
        max_maps = min(max(40_000, held + 4_000), 56_000)
        for _ in range(max(1, (55_000 - held) // 3_000)):
            yield


set_environment()  # at import, because a test module may import jax before any pytest hook
enable_interrupts()
collect_seldom()
MAPS_CHECKED = check_memory_maps()


def laps() -> Iterator[float]:
    """The CPU seconds of this process and its ended children since the last step."""
    before = 0.0
    while True:
        now = sum(os.times()[:4])
        yield now - before
        before = now


CPU_SECONDS = laps()


def pytest_addoption(parser):
    parser.addoption(
        "--typecheck",
        action="store_true",
        help="check shapes and types of jaxkv's signatures at each call, as CI does",
    )
    parser.addoption(
        "--must-run",
        default="",
        metavar="MARKERS",
        help=f"skips with these markers fail; comma-separated, of {', '.join(NEEDS)}",
    )


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # before any worker writes to it
        delete_oldest(COMPILED, MAX_COMPILED)
    for marker in must_run(config):
        if marker not in NEEDS:
            raise pytest.UsageError(f"--must-run {marker}: not one of {', '.join(NEEDS)}")
        if missing(marker):
            raise pytest.UsageError(f"--must-run {marker}: {missing(marker)}")
    if config.option.typecheck:
        from jaxtyping import install_import_hook

        from tests import typecheck

        install_import_hook(core_modules(), f"{typecheck.__name__}.check")

    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def delete_oldest(folder: Path, limit: int):
    """If the files of a folder exceed the limit in bytes, delete the oldest until half is left."""
    facts = {}
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):  # another run deletes, too
            facts[path] = path.stat()
    total = sum(fact.st_size for fact in facts.values())
    if total <= limit:
        return
    for path in sorted(facts, key=lambda path: facts[path].st_mtime):
        if total <= limit // 2:
            return
        path.unlink(missing_ok=True)
        total -= facts[path].st_size


def core_modules():
    """The modules in the folder `jaxkv`, without `jaxkv.models` and other folders."""
    folder = Path(__file__).resolve().parents[1] / "jaxkv"
    return [f"jaxkv.{path.stem}" for path in folder.iterdir() if path.name[0] not in "._"]


def pytest_report_header():
    names = [name for name in ("jax", "flax", "numpy", "torch", "transformers") if find_spec(name)]
    return "versions: " + ", ".join(f"{name} {version(name)}" for name in names)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Not pytest-xdist's own groups: with pytest 9.2 each test is a group of its own."""
    if config.getvalue("dist") != "loadscope":
        return None
    from tests import schedule

    scheduler = schedule.LongestFirst(config, log)
    scheduler.seconds = schedule.read_durations(DURATIONS)
    return scheduler


def pytest_collection_modifyitems(items):
    for item in items:
        for marker in NEEDS:
            if item.get_closest_marker(marker) and missing(marker):
                item.add_marker(pytest.mark.skip(reason=missing(marker)))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the test model and texts, beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(NO_SHARED)
    return folder


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; mark its tests `real_model`."""
    from jaxkv.models.loading import smollm2

    pytest.importorskip("gguf", reason="no gguf: pip install -e '.[models]'")
    try:
        return smollm2.fetch()
    except smollm2.Unreachable as error:
        pytest.skip(f"{NO_MODEL}{error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_file):
    """SmolLM2-135M-Instruct, loaded in float32; mark its tests `real_model`."""
    from jaxkv import models

    return models.load(smollm2_file, "float32")


@pytest.fixture(autouse=True)
def limit_memory_maps():
    yield
    next(MAPS_CHECKED)


@pytest.fixture
def unchecked():
    """Disable shape checks, for tests of the errors that users see for wrong types."""
    if not find_spec("jaxtyping"):
        yield
        return
    from jaxtyping import config

    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


@pytest.fixture
def optax_promotes_dtypes():
    """Optax mixes dtypes, which strict promotion refuses."""
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def missing(marker):
    """Why tests with this marker cannot run; an empty string if they can."""
    absent = [name for name in NEEDS[marker] if not find_spec(name)]
    return f"no {' and '.join(absent)}: pip install {INSTALL[marker]}" if absent else ""


def must_run(config):
    return [marker for marker in config.option.must_run.split(",") if marker]


def allowed_skip(reason):
    """Whether a test that must run may be skipped.

    Data beside the repository may be absent. So may the real model where no package index is
    reachable, but not where its file is in the cache.
    """
    from jaxkv.models.loading import smollm2

    return NO_SHARED in reason or (NO_MODEL in reason and not smollm2.location().is_file())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Adds CPU seconds, which do not depend on what else the machine does, as durations do.

    A skip that `--must-run` forbids becomes a failure.
    """
    report = yield
    report.user_properties.append(("cpu_seconds", next(CPU_SECONDS)))
    needed = any(item.get_closest_marker(marker) for marker in must_run(item.config))
    if report.skipped and needed and not allowed_skip(str(report.longrepr)):
        report.outcome = "failed"
    return report


def cpu_by_tier(reporter) -> Counter:
    """CPU seconds by the folder below tests/."""
    seconds = Counter()
    for report in (report for reports in reporter.stats.values() for report in reports):
        for name, value in getattr(report, "user_properties", ()):
            if name == "cpu_seconds":
                seconds[report.nodeid.split("/")[1]] += value
    return seconds


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and session.config.getvalue("dist") == "loadscope":
        from tests import schedule

        schedule.write_durations(DURATIONS, schedule.durations(reporter))


def pytest_terminal_summary(terminalreporter):
    tiers = ", ".join(f"{x} {seconds:.0f}" for x, seconds in cpu_by_tier(terminalreporter).items())
    terminalreporter.write_line(f"CPU seconds by tier: {tiers or 'no test ran'}")
