"""The persistent compilation cache: its folder, its reuse, and what a user is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxkv.models.loading import compilation
from jaxkv.models.loading.compilation import (
    CACHE_HIT,
    CACHE_MISS,
    VARIABLE,
    cache_events,
    enable_compilation_cache,
    report_unusable_cache,
)
from jaxkv.policies import POLICIES
from tests.seldom import seldom
from tests.tiny import write_tiny

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
# Small caches, each below the prompt where the policy evicts or compresses, and the engine. The
# first part has the policies whose programs differ most and take longest to compile.
STARTS = (
    ("full:start=32", "streaming:sinks=1,window=3", "reservoir:sinks=1,window=4,sample=4",
     "balance-stream:sinks=1,window=4,levels=2,block=4", "magicpig:K=2,L=6,sinks=1,window=4",
     "engine"),
    ("window:window=8", "h2o:heavy=4,window=4", "stratified:sinks=1,window=4,sample=4",
     "balance:sinks=1,window=4,rounds=1,block=8,start=32",
     "uniform:sinks=1,window=4,rounds=1,start=32", "snapkv:capacity=12,window=4,start=32",
     "pyramidkv:capacity=12,window=4,start=32",
     "expected-attention:capacity=8,sinks=2,future=16,start=32", "keydiff:capacity=8,start=32",
     "topk:share=0.5,start=32", "topp:mass=0.9,start=32", "oracle:share=0.5,start=32",
     "quest:share=0.5,start=32", "vattention:sinks=2,window=4,start=32"),
)  # fmt: skip
START = """
import collections, json, sys, jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
from jaxkv import models
from jaxkv.serve.engine import Request, answer
from jaxkv.models.generation.serving import make_engine
llm = models.load(sys.argv[1])

def counted(answer):
    before = events.copy()
    tokens, new = answer(), events - before
    # JAX counts a miss only where it stores the program.
    asked, found, stored = (
        new["/jax/compilation_cache/" + name]
        for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")
    )
    return {"tokens": tokens, "found": found, "compiled": asked - found, "stored": stored}

def run(name):
    if name != "engine":
        return models.generate(llm, "x" * 30, name, 3, ignore_eos=True).tokens
    made = make_engine(llm, "streaming:sinks=1,window=3", max_batch=1, max_len=32, chunk=16)
    return answer(made, [Request((3, 4, 5), 5)])[0].tokens

print(json.dumps({name: counted(lambda: run(name)) for name in sys.argv[2:]}))
"""


@pytest.fixture
def config():
    """JAX's settings as in a new process, restored after the test."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)


def start(folder: Path, cache: str, names: tuple[str, ...]) -> dict[str, dict]:
    """For each policy or the engine: its tokens, and the numbers of programs found and compiled."""
    environment = os.environ | {VARIABLE: cache, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # set for the tests
    result = subprocess.run(
        [sys.executable, "-c", START, folder, *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("names", [STARTS[0], seldom(STARTS[1])], ids=["often", "seldom"])
def test_a_second_start_compiles_nothing(tmp_path, names):
    folder, cache = write_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "new" / "cache"
    first = start(folder, str(cache), names)
    stored = sorted(path.name for path in cache.iterdir() if not path.name.endswith("-atime"))
    assert len(stored) == sum(run["stored"] for run in first.values()) > len(names)
    second = start(folder, str(cache), names)
    assert {name: run["compiled"] for name, run in second.items()} == dict.fromkeys(first, 0)
    assert all(run["found"] > 0 for run in second.values())
    tokens = [{name: run["tokens"] for name, run in runs.items()} for runs in (first, second)]
    assert tokens[0] == tokens[1]
    again = sorted(path.name for path in cache.iterdir() if not path.name.endswith("-atime"))
    assert again == stored


def test_every_policy_is_started_twice():
    tested = [name.partition(":")[0] for names in STARTS for name in names]
    assert sorted(tested) == sorted([*POLICIES, "engine"])


def test_programs_that_cannot_be_read_are_reported_by_the_command(tmp_path):
    folder, cache = write_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "cache"
    command = [sys.executable, "-m", "jaxkv.cli", "generate", "--model", folder, "Hi",
               "--policy", "streaming:sinks=1,window=3", "--max-new-tokens", "2"]  # fmt: skip
    environment = os.environ | {VARIABLE: str(cache), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    lines = []
    for damaged in (False, False, True, True):
        for program in cache.glob("*-cache") if damaged else ():
            program.write_bytes(b"of another machine")
            os.utime(program, (1, 1))
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr[-3000:]
        lines.append(result.stderr.count("compiled programs are stored in"))
    assert lines == [0, 0, 1, 0]


def test_compilations_are_stored_in_the_chosen_folder(config, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "chosen"))
    enable_compilation_cache()
    assert config.jax_compilation_cache_dir == str(tmp_path / "chosen")
    assert (tmp_path / "chosen").is_dir()
    # With JAX's own thresholds, programs as small as these are not cached.
    assert config.jax_persistent_cache_min_compile_time_secs == 0
    assert config.jax_persistent_cache_min_entry_size_bytes == -1


@pytest.mark.parametrize(
    ("platform", "variable", "inside"),
    [
        ("linux", "XDG_CACHE_HOME", "jaxkv/compilations"),
        ("linux", "HOME", ".cache/jaxkv/compilations"),
        ("darwin", "HOME", "Library/Caches/jaxkv/compilations"),
        ("win32", "LOCALAPPDATA", "jaxkv/compilations"),
    ],
)
def test_the_default_cache_folder(platform, variable, inside, config, tmp_path, monkeypatch):
    for name in (VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compilation.sys, "platform", platform)
    monkeypatch.setenv(variable, str(tmp_path))
    enable_compilation_cache()
    assert config.jax_compilation_cache_dir == str(tmp_path / inside)


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "false"])
def test_the_cache_can_be_disabled(word, config, monkeypatch):
    monkeypatch.setenv(VARIABLE, word)
    enable_compilation_cache()
    assert config.jax_compilation_cache_dir is None


def test_a_cache_configured_in_jax_stays(config, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ours"))
    config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    enable_compilation_cache()
    assert config.jax_compilation_cache_dir == str(tmp_path / "theirs")
    assert not list(tmp_path.iterdir())


def test_a_cache_folder_that_cannot_be_created_is_reported(config, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    enable_compilation_cache()
    assert config.jax_compilation_cache_dir is None
    reported = capsys.readouterr()
    assert reported.err.startswith("jaxkv: no compilation cache: ") and reported.out == ""


@pytest.fixture
def begin(config, tmp_path, monkeypatch, capsys):
    """A function that simulates a start which reads and stores programs, and returns its output."""
    config.update("jax_compilation_cache_dir", str(tmp_path))

    def begin(hits=0, stored=3, policy="streaming", host="one", version="1"):
        monkeypatch.setattr(compilation.platform, "node", lambda: host)
        monkeypatch.setattr(compilation, "version", lambda _: version)
        for marker in tmp_path.glob("jaxkv-*"):  # of earlier starts
            os.utime(marker, (time.time() - 60,) * 2)
        cache_events().clear()
        for event in [CACHE_HIT] * hits + [CACHE_MISS] * stored:
            jax.monitoring.record_event(event)
        for number in range(stored):
            program = tmp_path / f"jit_{policy}-{number}-cache"
            if not program.exists():  # JAX does not replace one
                program.touch()
        report_unusable_cache(policy, 4)
        for program in tmp_path.glob("*-cache"):
            os.utime(program, (time.time() - 120,) * 2, follow_symlinks=False)
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return begin


def test_a_cache_that_no_start_can_read_is_reported_once(begin, tmp_path):
    assert begin() == ""
    for number in range(20):  # as if another process deleted them after they were listed
        (tmp_path / f"jit_gone-{number}-cache").symlink_to("nowhere")
    line = begin()
    assert line.startswith(f"jaxkv: compiled programs are stored in {tmp_path}, but this machine ")
    assert line.count("\n") == 1 and VARIABLE in line and "jaxlib other than 1 " in line
    assert begin() == begin(policy="full") == begin(policy="full") == ""
    assert begin(version="2") == "" != begin(version="2")
    assert begin(host="two") == "" != begin(host="two")


def test_a_cache_that_is_read_is_not_reported(begin, tmp_path):
    assert begin() == begin(hits=3, stored=0) == begin(hits=3) == begin(stored=0) == ""
    assert begin(policy="full") == begin(policy="h2o") == ""  # other programs
    for program in tmp_path.glob("*-cache"):
        program.unlink()
    assert begin() == ""  # stores the programs that were deleted
