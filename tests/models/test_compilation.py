"""Programs compiled ahead, shared by layers and stored; the measured compile time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import Stream
from jaxkv.models.generation import session
from jaxkv.models.loading import compilation
from jaxkv.models.loading.compilation import VARIABLE, Ahead, Clock, clock, enable_compilation_cache
from jaxkv.models.loading.llm import load_weights, without_weights
from jaxkv.models.loading.source import open_source
from jaxkv.models.tools import measurement
from jaxkv.models.tools.measurement import Stretches
from jaxkv.policies import POLICIES
from tests.seldom import seldom
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of three equal layers."""
    return write_tiny(tmp_path_factory.mktemp("deep"), num_hidden_layers=3)


@pytest.fixture
def compilations():
    """The names of the programs that are compiled, by the thread that compiles them."""
    jax.clear_caches()
    Ahead.compilations.clear()
    seen = {"here": [], "ahead": []}

    def listen(event, duration, fun_name="", **_):
        if event.endswith("/backend_compile_duration"):
            on_main_thread = threading.current_thread() is threading.main_thread()
            seen["here" if on_main_thread else "ahead"].append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen


@pytest.mark.parametrize(
    ("policy", "kinds"), [("streaming:sinks=1,window=7", 1), ("pyramidkv:capacity=9,window=3", 3)]
)
def test_layers_with_one_policy_share_their_prefill(deep, compilations, policy, kinds):
    stream = Stream(models.load(deep), policy, tokens=40)
    stream.prefill([[65] * 20], chunk=16)  # chunks of 16, and of 4 padded to 16
    assert compilations["here"].count("jit(run_layer)") == kinds


def test_a_scored_text_shares_the_prefill_of_its_layers(deep, compilations):
    models.score(models.load(deep), [65] * 40, "streaming:sinks=1,window=7", chunk=16)
    assert compilations["here"].count("jit(run_layer)") == 1


def test_programs_are_compiled_before_the_weights_are_loaded(deep, compilations):
    source = open_source(deep)
    llm = without_weights(source)
    assert llm.unloaded_bytes > 0
    stream = Stream(llm, "streaming:sinks=1,window=7")
    stream.compile_ahead([5, 40], models.Sampling(), llm.eos)
    load_weights(llm, source)
    assert llm.unloaded_bytes == 0
    compilations["here"].clear()
    stream.prefill([[65] * 40])
    stream.prefill([[66] * 5])
    tokens = stream.decode(models.Sampling(), 9, llm.eos)[0].tolist()
    assert compilations["here"] == []
    assert {"jit(run_layer)", "jit(decode_block)"} <= set(compilations["ahead"])
    stream = Stream(models.load(deep), "streaming:sinks=1,window=7")
    stream.prefill([[65] * 40])
    stream.prefill([[66] * 5])
    assert stream.decode(models.Sampling(), 9, llm.eos)[0].tolist() == tokens


def test_a_measurement_compiles_while_other_policies_run(deep, compilations, monkeypatch):
    """Whatever computes with a cache or a head is compiled in other threads."""
    llm = models.load(deep)
    ids = np.random.default_rng(0).integers(2, 250, (2, 89)).astype(np.int32)
    policies = ["window:window=16", "keydiff:capacity=8", "uniform:sinks=2,window=5,rounds=2"]
    show = lambda *_: contextlib.nullcontext(lambda done: None)
    measure = lambda: measurement.measure(
        llm, Stretches(ids, 72), ["full", *policies], 0, show, full="full", decode=True
    )
    results = [measure()]
    monkeypatch.setattr(measurement, "_compile_ahead", lambda *_: None)
    results.append(measure())
    heavy = {f"jit({name})" for name in ("run_layer", "_run_recorded", "absorb", "compare_chunk",
                                         "finish_prefill_layer", "decode_block")}  # fmt: skip
    assert heavy <= set(compilations["ahead"]) and not heavy & set(compilations["here"])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual.losses, expected.losses)


@pytest.mark.parametrize(
    "policy",
    ["full:start=16", "full:start=64", "snapkv:capacity=9,window=3", "topk:share=0.5,start=16",
     seldom("magicpig:K=2,L=3,sinks=1,window=2"),
     seldom("balance-stream:window=5,levels=2,block=4"),
     "balance:sinks=1,window=2,block=8,rounds=1,start=16"],
)  # fmt: skip
@pytest.mark.parametrize("length", [5, 20])
@pytest.mark.filterwarnings("ignore:.*needs a prompt of at least")
def test_a_text_of_known_length_compiles_each_program_once(deep, compilations, policy, length):
    llm = models.load(deep)
    stream = Stream(llm, policy, tokens=length + 60)
    stream.compile_ahead([length], models.Sampling(), ())
    stream.prefill([[65] * length])
    stream.finish_prefill()
    for _ in range(4):
        stream.decode(models.Sampling(), 15, ())
    compiled = compilations["here"] + compilations["ahead"]
    assert compiled.count("jit(run_layer)") == compiled.count("jit(decode_block)") == 1


@pytest.mark.parametrize(
    "policy",
    ["streaming:sinks=4,window=252", seldom("window:window=512"), seldom("full"),
     seldom("snapkv:capacity=64,window=8"), seldom("reservoir:sinks=1,window=8,sample=8")],
)  # fmt: skip
def test_turns_after_the_warm_up_compile_nothing(deep, compilations, policy, tmp_path):
    """Also after a conversation is saved and loaded."""
    talk, sampling = models.Conversation(models.load(deep), policy), models.Sampling(0.8)
    seen = []
    talk.warm_up(sampling, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen) > 3
    assert "jit(decode_block)" in compilations["ahead"]
    for name in compilations:
        compilations[name].clear()
    with warnings.catch_warnings(action="ignore"):  # too short to compress
        for length in (3, 30, 100, 300):  # together within the trained context
            assert "".join(talk.say("x" * length, sampling, 9, stop=["never said"]))
        session.save(tmp_path / "session", talk)
        again = session.load(tmp_path / "session", talk)
        assert "".join(again.say("And?", sampling, 9))
    assert compilations == {"here": [], "ahead": []}


def test_cancelled_programs_are_compiled_later(monkeypatch):
    """A program that has not begun is dropped, and may be asked for again."""
    threads, go = ThreadPoolExecutor(1), threading.Event()
    monkeypatch.setattr(compilation, "_threads", lambda: threads)
    threads.submit(go.wait)
    ahead, program, x = Ahead(), jax.jit(lambda x: x * 7), np.ones(3, np.float32)
    ahead.compile("one", program, x)
    (dropped,) = ahead._running["one"]
    ahead.cancel()
    assert dropped.cancelled() and not ahead._running
    ahead.compile("one", program, x)
    go.set()
    ahead.wait_all()
    assert any(key[0] is program for key in Ahead.compilations)
    threads.shutdown()


def test_a_stop_ends_the_wait_for_a_program(monkeypatch):
    threads, go, asked = ThreadPoolExecutor(1), threading.Event(), []
    monkeypatch.setattr(compilation, "_threads", lambda: threads)
    threads.submit(go.wait)
    ahead = Ahead(lambda: asked.append(1) or len(asked) > 2)
    ahead.compile("one", jax.jit(lambda x: x * 11), np.ones(3, np.float32))
    assert not ahead.wait("one") and len(asked) == 3
    (dropped,) = ahead._running["one"]
    ahead.cancel()
    assert dropped.cancelled()
    go.set()
    threads.shutdown()
    assert Ahead().wait("one")


def test_nested_traces_count_once():
    """JAX reports inner traces first: 1-2 and 3-4 are inside 0-5. 6-8 follows."""
    watch = Clock()
    reported = []
    for end, duration in ((2, 1), (4, 1), (5, 5), (8, 2)):
        watch.add(end, duration)
        reported.append(watch.seconds)
    assert reported == [1, 2, 5, 7]
    watch.add(9, 1.5)  # 7.5-9, from another thread
    assert watch.seconds == 8


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
     "retrieval:capacity=8,sinks=2,window=4,start=32", "tova:capacity=8",
     "rkv:capacity=8,window=4,every=4", "vase:capacity=16,window=4,every=4",
     "triattention:capacity=8,every=4",
     "topk:share=0.5,start=32", "topp:mass=0.9,start=32", "oracle:share=0.5,start=32",
     "quest:share=0.5,start=32", "loki:share=0.5,start=32",
     "vattention:sinks=2,window=4,start=32"),
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


@pytest.mark.parametrize(
    "platform, variables, setting, folder",
    [("linux", {"XDG_CACHE_HOME": "{}"}, None, "{}/jaxkv/compilations"),
     ("linux", {"HOME": "{}"}, None, "{}/.cache/jaxkv/compilations"),
     ("darwin", {"HOME": "{}"}, None, "{}/Library/Caches/jaxkv/compilations"),
     ("win32", {"LOCALAPPDATA": "{}"}, None, "{}/jaxkv/compilations"),
     *(("linux", {VARIABLE: word}, None, None) for word in ("off", "OFF", "0", "no", "false")),
     ("linux", {VARIABLE: "{}/ours"}, "{}/theirs", "{}/theirs"),
     ("linux", {VARIABLE: "{}/file/cache"}, None, None)],
)  # fmt: skip
def test_the_cache_folder(
    platform, variables, setting, folder, config, tmp_path, monkeypatch, capsys
):
    """JAX's own setting stays. A folder that cannot be created is reported."""
    (tmp_path / "file").touch()
    for name in (VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    monkeypatch.setattr(compilation.sys, "platform", platform)
    config.update("jax_compilation_cache_dir", setting and setting.format(tmp_path))
    enable_compilation_cache()
    assert config.jax_compilation_cache_dir == (folder and folder.format(tmp_path))
    assert not (tmp_path / "ours").exists()
    reported, fails = capsys.readouterr(), "{}/file/cache" in variables.values()
    assert reported.err.startswith("jaxkv: no compilation cache: " if fails else "")
    assert reported.out == "" and bool(reported.err) == fails


def test_the_clock_counts_compiling_and_waiting_and_not_other_threads():
    watch, ahead, x = clock(), Ahead(), np.ones((300, 300), np.float32)
    assert clock() is watch
    before = watch.seconds
    ahead.compile("one", jax.jit(lambda x: (x @ x @ x).sum()), x)
    while not ahead._running["one"][0].done():
        time.sleep(0.01)
    assert watch.seconds == before
    ahead.wait("one")
    waited = watch.seconds
    assert before < waited < before + 0.1
    ahead.wait("one")
    assert watch.seconds == waited
    work = jax.jit(lambda x: (x @ x).sum())
    work(x).block_until_ready()
    compiled = watch.seconds
    assert waited < compiled < waited + 60
    for _ in range(5):
        work(x).block_until_ready()
    assert watch.seconds == compiled
