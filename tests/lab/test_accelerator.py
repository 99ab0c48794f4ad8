"""The training commands of ACCELERATOR.md, as printed, with small models on virtual CPU devices."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from jaxkv.cli import main
from jaxkv.evals.lib.run import run
from tests.models.training_data import write_texts
from tests.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Training"
SHORT = (
    "batch_size=8 grad_accum_steps=1 steps=2 eval_every=2 save_every=2 valid_samples=8 context=16"
)
SMALL = f"{SHORT} layers=1 width=32 heads=4 kv_heads=2 mlp=48"
NOT_RUN = ("tests/models/test_uncached.py",)  # a test, which needs a GPU
# Words of a command -> words that end it sooner; the last of a repeated flag counts.
SOONER = {
    "data --text": "--vocab-size 300",
    "data --tokenizer": "",
    "pretrain --preset": " ".join(f"--set {setting}" for setting in SMALL.split()),
    "pretrain --from": " ".join(f"--set {setting}" for setting in SHORT.split()),
    "evals.training.mfu": "--preset backcopy --rows 1 --rounds 1 --quick",
    "evals.training.sink_tables": "--tokens 1100 --quick",
    "evals.training.sinks_in_front": "--tokens 40 --windows 12 --starts 1 --quick",
}
# Programs that write down their words; the variables are those that the page leaves to the reader.
SHELL = """
for program in python jaxkv; do
  eval "$program() { printf '%q ' $program \\"\\$@\\" >> calls; echo >> calls; }"
done
MODEL=model FIRST=127.0.0.1 NUMBER=NUMBER
"""
pytestmark = [
    pytest.mark.usefixtures("optax_promotes_dtypes"),
    pytest.mark.filterwarnings("ignore:.* beyond the trained context of 16"),
    pytest.mark.skipif(os.name != "posix", reason="the commands are for a POSIX shell"),
]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """The current folder, with the files that the commands read."""
    for part in ("train", "train_more", "valid", "test"):
        write_texts(tmp_path / "books" / part, documents=4, words=1200)
    write_tiny(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calls(folder: Path) -> list[list[str]]:
    """The words of each command of the section, as a shell expands them in a folder."""
    page = (ROOT / "ACCELERATOR.md").read_text("utf-8")
    section = page.split(f"{SECTION}\n")[1].split("\n## ")[0]
    tokens = MarkdownIt("commonmark").parse(section)
    script = "".join(t.content for t in tokens if t.type == "fence" and t.info == "bash")
    script = script.replace("tar ", "true tar ")
    subprocess.run(["bash", "-euc", SHELL + script], cwd=folder, check=True)
    return [shlex.split(line) for line in (folder / "calls").read_text("utf-8").splitlines()]


def test_every_training_command_runs(workdir, capsys):
    commands = calls(workdir)
    assert len(commands) > 15
    for words in commands:
        line = " ".join(words)
        if any(text in line for text in NOT_RUN):
            continue
        sooner = [flags for text, flags in SOONER.items() if text in line]
        assert sooner, f"no small form of {line!r}"
        words = [*words[1 if words[0] == "jaxkv" else 2 :], *sooner[0].split()]
        if "NUMBER" in line:
            run_both(words)
        elif words[0] in ("data", "jaxkv.cli"):
            assert main(words[words[0] == "jaxkv.cli" :]) == 0, capsys.readouterr().err
        else:
            run(importlib.import_module(words[0]).MEASURE, words[1:])
    assert {path.parent.name for path in workdir.glob("out/runs/*/hf")} >= {"none", "v5e", "hosts"}


def run_both(words: list[str]) -> None:
    """Two processes of one run over loopback, with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    with contextlib.ExitStack() as stack:
        processes = []
        for number in "01":
            its = [word.replace("1234", port).replace("NUMBER", number) for word in words]
            process = subprocess.Popen([sys.executable, "-m", *its], env=environment)
            processes.append(process)
            stack.callback(process.kill)  # the other one fails, if one does
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
