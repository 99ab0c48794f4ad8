"""Whole training runs in real processes: killed, resumed, on one device and on many."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.models.training import checkpoint, run_folder, training
from jaxkv.models.training.pretrain import pretrain, setting_of
from tests.models.training_data import SMALL, small

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals"),
    pytest.mark.usefixtures("optax_promotes_dtypes"),
]


@pytest.fixture(scope="module")
def start(tokens):
    """A function that starts `jaxkv pretrain` on the small corpus."""

    def start(
        out: Path, *settings: str, flags=(), devices: int = 1, limit: int | None = None
    ) -> subprocess.Popen:
        environment = os.environ | {
            # Programs are read from the cache; with a limit of file sizes, none is written.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0" if limit is None else "1000000",
            "XLA_FLAGS": re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"]),
        }
        chosen = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
        words = ["pretrain", "--preset", "tiny", "--data", tokens.folder, "--out", out, *flags]
        before = [] if limit is None else ["sh", "-c", f'ulimit -f {limit}; exec "$@"', "sh"]
        command = [*before, sys.executable, "-m", "jaxkv.cli", *map(str, words), *chosen]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    return start


def finish(process: subprocess.Popen) -> str:
    """The standard error of a process, which must succeed."""
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return err


def lines(out: Path) -> list[dict]:
    """The lines of the log without their timings."""
    timed = {"seconds", "tokens_per_second", "mfu"}
    log = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    for line in log:
        assert timed < line.keys() and {"step", "loss", "lr", "grad_norm"} < line.keys()
    return [{name: x for name, x in line.items() if name not in timed} for line in log]


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    finish(start(out, "sink_variant=token", "save_every=1", "steps=12"))
    return out


@pytest.fixture(scope="module")
def trained_run(tokens, tmp_path_factory) -> Path:
    """The folder of a run in this process."""
    out = tmp_path_factory.mktemp("made") / "run"
    with jax.numpy_dtype_promotion("standard"):
        run_here(tokens, out, "sink_variant=token", "save_every=1")
    return out


def run_here(tokens, out, *settings, **how):
    return pretrain(small(*settings), tokens, out, tell=lambda line: None, **how)


def test_the_files_of_a_run(trained_run, tokens):
    assert [line["step"] for line in lines(trained_run)] == list(range(1, 13))
    looked = [line for line in lines(trained_run) if "valid_loss" in line]
    assert [line["step"] for line in looked] == [6, 12]
    assert looked[-1]["valid_loss"] < looked[0]["valid_loss"]
    assert {"first_token", "first_token_most", "sink_heads", "text"} < looked[0].keys()
    assert sorted(p.name for p in (trained_run / "last").iterdir()) == ["11", "12"]
    best = min(looked, key=lambda line: line["valid_loss"])["step"]
    assert [p.name for p in (trained_run / "best").iterdir()] == [str(best)]
    assert (trained_run / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_run_killed_and_resumed_gives_the_same_result(start, uninterrupted, tmp_path):
    """Killed at random moments: at the start, in training, and while it writes checkpoints."""
    out, moments, kills, killed_in_write = tmp_path / "run", random.Random(0), 0, 0
    settings = ("sink_variant=token", "save_every=1", "steps=12")
    log = out / "log.jsonl"
    for _ in range(40):
        process = start(out, *settings)
        before = log.read_text("utf-8").count("\n") if log.exists() else 0
        steps, wait = moments.randrange(2, 5), moments.uniform(0, 0.1)
        while process.poll() is None:
            now = log.read_text("utf-8").count("\n") if log.exists() else 0
            half = list(out.glob("last/*tmp*"))
            # Two kills: the first at random, the last during the write of a checkpoint.
            kill_again = kills < 2 or not killed_in_write
            if kill_again and now > before + steps and (half or not kills):
                time.sleep(0 if kills else wait)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001 if now > before else 0.05)  # it starts for seconds
        process.communicate(timeout=300)
        killed_in_write += bool(list(out.glob("last/*tmp*")))
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert process.returncode == 0 and kills >= 2
    assert killed_in_write, "no kill was during the write of a checkpoint"
    assert lines(out) == lines(uninterrupted)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / "hf" / file).read_bytes() == (uninterrupted / "hf" / file).read_bytes()


def test_ctrl_c_writes_a_checkpoint(start, tmp_path):
    out = tmp_path / "run"
    process = start(out, "steps=100000", "save_every=100000", "eval_every=100000")
    while not (out / "log.jsonl").exists() or not (out / "log.jsonl").read_text("utf-8"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "the same command resumes" in err
    (last,) = (out / "last").iterdir()
    assert int(last.name) == lines(out)[-1]["step"]


@pytest.mark.slow
def test_two_processes_have_the_same_losses(start, uninterrupted, tmp_path):
    """Over loopback, with one device each."""
    out, settings = tmp_path / "run", ("sink_variant=token", "steps=12", "save_every=12")
    processes = two(start, out, *settings)
    for process in processes:
        finish(process)
    actual_lines, expected_lines = lines(out), lines(uninterrupted)
    for name in ("loss", "grad_norm"):
        actual, expected = ([x[name] for x in log] for log in (actual_lines, expected_lines))
        np.testing.assert_allclose(actual[:4], expected[:4], rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(actual, expected, rtol=1e-3, err_msg=name)
    assert (out / "hf" / "model.safetensors").exists()


def two(start, out: Path, *settings: str) -> list[subprocess.Popen]:
    """Start two processes of one run, with one device each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = "--mesh", "data=2", f"--distributed=127.0.0.1:{port},2,"
    return [start(out, *settings, flags=(*words[:2], words[2] + number)) for number in "01"]


@pytest.mark.slow
def test_ctrl_c_in_two_processes(start, tmp_path):
    """One process is interrupted. Both stop at the same step and write its checkpoint."""
    out = tmp_path / "run"
    processes = two(start, out, "steps=100000", "save_every=100000", "eval_every=100000")
    while not (out / "log.jsonl").exists() or not (out / "log.jsonl").read_text("utf-8"):
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGINT)
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [130, 130], outputs
    (last,) = (out / "last").iterdir()
    assert int(last.name) == lines(out)[-1]["step"]


@pytest.mark.slow
def test_an_error_in_one_process_ends_both(start, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for process in two(start, tmp_path):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2 and err.count("holds other files") == 1, err


def test_several_processes_need_a_mesh(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"several processes need a mesh .*; give --mesh data="):
        run_here(tokens, tmp_path / "run")


def test_a_nan_loss_stops_the_run(tokens, tmp_path):
    """The error names the step. The last finite checkpoint stays."""
    with pytest.raises(UserError, match="not finite at step") as error:
        run_here(tokens, tmp_path / "run", "lr=1e30", "clip=1e30", "warmup=0.5", "save_every=1")
    failed, last = map(int, re.findall(r" step (\d+)", str(error.value)))
    assert last == failed - 1 == max(int(p.name) for p in (tmp_path / "run" / "last").iterdir())
    assert not (tmp_path / "run" / "hf").exists()
    with pytest.raises(UserError, match="not finite at step 1; there is no checkpoint yet"):
        run_here(tokens, tmp_path / "other", "z_loss=1e38")


def test_a_folder_belongs_to_one_run(tokens, trained_run, tmp_path):
    with pytest.raises(
        UserError, match=r"of another run: .*sink_variant was 'token' and is now 'zero'"
    ):
        run_here(tokens, trained_run, "sink_variant=zero")
    assert run_here(tokens, trained_run, "sink_variant=token", "remat=layers", "log_every=2")
    occupied = tmp_path / "other"
    occupied.mkdir()
    (occupied / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"holds other files \(thesis.tex\); choose another"):
        run_here(tokens, occupied)
    with (
        run_folder.lock_folder(tmp_path / "held", {"a": 1}),
        pytest.raises(UserError, match="another run is writing to"),
        run_folder.lock_folder(tmp_path / "held", {"a": 1}),
    ):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="must be a folder that can be written to"):
        run_here(tokens, tmp_path / "file")


def newest(out: Path) -> Path:
    return max((out / "last").iterdir(), key=lambda path: int(path.name))


# Orbax leaves unfinished coroutines when it fails.
FAILING_READS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def collect_garbage():
    """Collect garbage within the test, so that its warnings do not appear in a later one."""
    yield
    gc.collect()


DAMAGE = {
    "a bit": lambda path, raw: path.write_bytes(
        raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :]
    ),
    "cut": lambda path, raw: path.write_bytes(raw[: len(raw) // 2]),
    "gone": lambda path, raw: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@FAILING_READS
def test_a_damaged_checkpoint_is_never_restored(collect_garbage, tokens, tmp_path, damage):
    """For each damaged file, restoring returns the values that were written, or raises."""
    out = tmp_path / "run"
    run_here(tokens, out, "steps=4")
    run, like = (
        json.loads((out / "run.json").read_text()),
        training.abstract_training(setting_of(small(), tokens)),
    )
    with checkpoint.Checkpoints(out, run) as checkpoints:
        expected = jax.tree.leaves(checkpoints.restore(like))
    refused = []
    for path in [path for path in newest(out).rglob("*") if path.is_file()]:
        raw = path.read_bytes()
        DAMAGE[damage](path, raw)
        with checkpoint.Checkpoints(out, run) as checkpoints:
            try:
                restored = jax.tree.leaves(checkpoints.restore(like))
                assert all(map(np.array_equal, restored, expected)), path
            except UserError as error:
                # A changed byte may leave valid JSON, of another run.
                message = r"checkpoint .*4 (cannot be read: .*|is that of another run); move that"
                assert re.search(message, str(error))
                refused.append(path.name)
        path.write_bytes(raw)
    assert len(refused) >= 4, refused


@FAILING_READS
def test_an_unreadable_checkpoint_is_named(collect_garbage, tokens, tmp_path):
    """An earlier checkpoint is used only after the user removes the unreadable one."""
    out = tmp_path / "run"
    run_here(tokens, out, "steps=4")
    last = newest(out)
    for path in [path for path in last.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff" * 10)
    with pytest.raises(UserError, match=f"checkpoint .*{last.name} cannot be read.*move that"):
        run_here(tokens, out, "steps=4")
    shutil.rmtree(last)
    assert run_here(tokens, out, "steps=4") == out / "hf"


def test_tensorboard(tokens, tmp_path, monkeypatch):
    """Every metric of every logged step is written, after a purge of older values."""
    calls = []

    class Board:
        def __init__(self, folder, purge_step):
            assert folder.endswith("tensorboard")
            calls.append(purge_step)

        add_scalar = staticmethod(lambda name, value, step: calls.append((name, step)))
        flush = staticmethod(lambda: None)

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Board))
    run_here(tokens, tmp_path / "run", "steps=2", tensorboard=True)
    assert calls[0] == 1 and ("loss", 2) in calls and ("valid_loss", 2) in calls
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match="pip install 'jaxkv\\[train\\]', or omit"):
        run_here(tokens, tmp_path / "other", "steps=2", tensorboard=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("setting", ["width=64", "seed=1"])
def test_a_checkpoint_of_another_run_is_refused(tokens, tmp_path, setting):
    """A checkpoint of a model of another size, or of another seed, copied into the run."""
    run_here(tokens, tmp_path / "other", "steps=2", setting)
    run_here(tokens, tmp_path / "run", "steps=2")
    shutil.rmtree(tmp_path / "run" / "last")
    shutil.copytree(tmp_path / "other" / "last", tmp_path / "run" / "last")
    with pytest.raises(UserError, match=r"checkpoint .* is that of another run; move"):
        run_here(tokens, tmp_path / "run", "steps=2")


@pytest.mark.slow
def test_a_full_disk(start, tokens, tmp_path):
    """Simulated by a limit of file sizes: the error is one line, and earlier checkpoints stay."""
    out, wide = tmp_path / "run", ("steps=4", "save_every=2", "width=64", "mlp=192")
    run_here(tokens, out, *wide)
    shutil.rmtree(out / "last" / "4")
    process = start(out, *wide, limit=20)  # in units of 512 bytes, less than a figure of the curves
    _, err = process.communicate(timeout=300)
    error = [line for line in err.splitlines() if "jaxkv: error" in line]
    assert process.returncode == 2 and len(error) == 1, err
    assert "can be written to" in error[0] and "File too large" in error[0]
    assert [p.name for p in (out / "last").iterdir() if p.name.isdecimal()] == ["2"]


def test_a_disk_too_small_for_a_checkpoint(tokens, tmp_path, monkeypatch):
    """The error precedes the write."""
    run_here(tokens, tmp_path / "run", "steps=2")
    shutil.rmtree(tmp_path / "run" / "last")
    shutil.rmtree(tmp_path / "run" / "best")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000))
    with pytest.raises(UserError, match=r"a checkpoint takes 0\.\d MB and 0\.1 MB are free"):
        run_here(tokens, tmp_path / "run", "steps=2")
    assert not list((tmp_path / "run" / "last").iterdir())


def test_a_run_killed_before_its_first_file_does_not_block(tokens, tmp_path):
    """The files of a process that was killed while it wrote run.json do not block the next."""
    out = tmp_path / "run"
    out.mkdir()
    (out / f".{run_folder.RUN}.abcd").write_text("{")
    (out / run_folder.LOCK).touch()
    assert run_here(tokens, out, "steps=2") == out / "hf"
