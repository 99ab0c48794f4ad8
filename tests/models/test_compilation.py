"""Programs compiled ahead and shared by layers, and the measured compile time."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import Stream
from jaxkv.models.generation import session
from jaxkv.models.loading import compilation
from jaxkv.models.loading.compilation import Ahead, Clock, clock
from jaxkv.models.loading.llm import load_weights, without_weights
from jaxkv.models.loading.source import open_source
from jaxkv.models.tools import measurement
from jaxkv.models.tools.measurement import Stretches
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


def test_a_measurement_compiles_while_other_policies_run(deep, compilations):
    """Whatever computes with a cache or a head is compiled in other threads."""
    llm = models.load(deep)
    ids = np.random.default_rng(0).integers(2, 250, (2, 89)).astype(np.int32)
    policies = ["window:window=16", "keydiff:capacity=8", "uniform:sinks=2,window=5,rounds=2"]
    show = lambda *_: contextlib.nullcontext(lambda done: None)  # noqa: E731
    results = [
        measurement.measure(
            llm,
            Stretches(ids, 72),
            ["full", *policies],
            0,
            show,
            full="full",
            decode=True,
            overlap=overlap,
        )
        for overlap in (True, False)
    ]
    heavy = {f"jit({name})" for name in ("run_layer", "_run_recorded", "absorb", "compare",
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


def test_the_clock_counts_waiting_and_not_other_threads():
    watch, ahead = clock(), Ahead()
    before = watch.seconds
    ahead.compile("one", jax.jit(lambda x: (x @ x @ x).sum()), np.ones((300, 300), np.float32))
    while not ahead._running["one"][0].done():
        time.sleep(0.01)
    assert watch.seconds == before
    ahead.wait("one")
    assert before < watch.seconds < before + 0.1
    counted = watch.seconds
    ahead.wait("one")
    assert watch.seconds == counted


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


def test_the_clock_counts_only_compile_time():
    watch, work = clock(), jax.jit(lambda x: (x @ x).sum())
    assert clock() is watch
    x = np.ones((500, 500), np.float32)
    before = watch.seconds
    work(x).block_until_ready()
    compiled = watch.seconds
    assert before < compiled < before + 60
    for _ in range(5):
        work(x).block_until_ready()
    assert watch.seconds == compiled


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


def test_compile_time_is_at_most_the_elapsed_time():
    watch, begin = clock(), time.perf_counter()
    before = watch.seconds

    @jax.jit
    def nested(x):
        for n in range(40):
            x = jax.jit(lambda y, n=n: jax.jit(lambda z: z * n)(y) + n)(x)
        return x

    nested(np.ones(7, np.float32)).block_until_ready()
    assert 0 < watch.seconds - before <= time.perf_counter() - begin
