"""Standard error has the lines of jaxkv alone, also where a start reads what another compiled.

.ci/run starts these tests a second time on the oldest Python with the JAX that pip takes there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import pytest

from jaxkv.cli import COMMANDS, progress
from jaxkv.errors import UserError
from jaxkv.models.loading.compilation import VARIABLE
from jaxkv.models.tools import pictures
from jaxkv.state import memory
from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
ROOT = Path(__file__).resolve().parents[3]
TEXT = ROOT / "models" / "default" / "passage.txt"
# For each command its words, and the lines that it prints on standard error. TMP is a folder of
# all starts, NEW one of this start. A text after < is standard input.
SIZE = r"\d\S* [KMG]iB"
# Printed every five seconds.
PROGRESS = r".* (\d+%, .* left|\d+ of \d+ \w+, \d+ s|\.\.\. \d+ s)"
# One start says all: they compile nothing, or what perplexity compiles, and read that.
STARTED_ONCE = ("policies", "models", "data", "compare", "view", "calibrate", "sinks")
SMALL = "--set layers=1 --set width=32 --set heads=1 --set kv_heads=1 --set mlp=32 --set context=32"
STARTS = {
    "generate": (
        "generate Once --max-new-tokens 5 --model TMP/model",
        rf"jaxkv: 5 tokens \(length\), \S+ tokens/s, compiled \S+ s, state {SIZE}",
    ),
    "chat": (
        "chat --max-new-tokens 5 --model TMP/model < Hello",
        "jaxkv: the model has no chat template: messages are sent as plain text",
        rf"\[5 tokens \(cut: --max-new-tokens\), \S+ tokens/s, cache {SIZE}, position 12\]",
    ),
    "perplexity": (f"perplexity --text {TEXT} --max-tokens 40 --model TMP/model",),
    "compare": (f"compare --text {TEXT} --max-tokens 40 --model TMP/model --policy full",),
    "advise": (
        f"advise --text {TEXT} --max-tokens 300 --prompt-tokens 16 --score-tokens 16 "
        "--policy streaming:sinks=1,window=15 --model TMP/model",
        r"jaxkv: measures full attention and 1 other on 8 stretches of 32 tokens; .*",
    ),
    "calibrate": (f"calibrate --text {TEXT} --max-tokens 40 --model TMP/model",),
    "view": (f"view --text {TEXT} --max-tokens 70 --out NEW/view.html --model TMP/model",),
    "sinks": (f"sinks --text {TEXT} --max-tokens 80 --capacity 20 --model TMP/model",),
    "policies": ("policies streaming",),
    "models": ("models",),
    "data": (f"data --text TMP/text.txt --valid {TEXT} --vocab-size 300 --out NEW",),
    "pretrain": (
        f"pretrain --preset tiny --data TMP/tokens --out NEW {SMALL} --set batch_size=2 "
        "--set steps=1",
        r"[\d,]+ weights, sink_variant=none, 2 x 32 tokens a step, float32, \d+ cores of .*",
        "compiling; a line every 10 steps",
        "  .*",
        "step 1/1  loss .*",
        "  valid .*",
    ),
    "serve": (
        "serve --port 0 --max-batch 1 --max-len 64 --policy window:window=16 --model TMP/model "
        "--chunk 16",
        r"jaxkv: compiling \.\.\.",
        r"jaxkv: serving model on http://127\.0\.0\.1:\d+ .*",
    ),
    "python": (
        "from jaxkv import models; "
        "models.generate(models.load('TMP/model'), 'Hi', max_new_tokens=5)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of all starts: texts, token shards and the compilation cache."""
    folder = tmp_path_factory.mktemp("starts")
    text = TEXT.read_text("utf-8")
    (folder / "text.txt").write_text(text[:3000], "utf-8")
    write_tiny(folder / "model")
    words = f"data --text TMP/text.txt --valid {TEXT} --vocab-size 300 --out TMP/tokens"
    assert start(words, folder, folder) == ""
    return folder


def start(words: str, folder: Path, new: Path, **variables: str) -> str:
    """What a command, or else a program in Python, prints on standard error."""
    words, _, stdin = words.partition(" < ")
    arguments = ["-c", words.replace("TMP", str(folder))]
    if words.partition(" ")[0] in COMMANDS:
        arguments = ["-m", "jaxkv.cli", *split(words, folder, new)]
    environment = os.environ | {VARIABLE: str(folder / "cache"), "JAX_PLATFORMS": "cpu"} | variables
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # set for the tests
    # With eight devices, as for the tests, programs compile and run more slowly.
    environment["XLA_FLAGS"] = re.sub(r"--\S+device_count=8", "", environment["XLA_FLAGS"])
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        served = b""
        if "serve" in arguments:
            while b"serving" not in served and (line := process.stderr.readline()):
                served += line
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(stdin.encode(), timeout=300)
    lines = (served + err).decode(errors="replace")
    assert process.returncode == 0, lines
    return lines


def split(words: str, folder: Path, new: Path) -> list[str]:
    return words.replace("TMP", str(folder)).replace("NEW", str(new)).split()


def of_jaxkv(lines: str) -> list[str]:
    """The lines without reports of progress, whose number depends on the machine's speed."""
    return [line for line in lines.splitlines() if not re.fullmatch(PROGRESS, line)]


@pytest.mark.parametrize("name", STARTS)
def test_a_start_prints_its_own_lines_alone(name, folder, tmp_path):
    words, *patterns = STARTS[name]
    for number in (1,) if name in STARTED_ONCE else (1, 2):
        (new := tmp_path / str(number)).mkdir()
        lines = of_jaxkv(start(words, folder, new))
        assert len(lines) == len(patterns), f"start {number}: {lines}"
        for line, pattern in zip(lines, patterns, strict=True):
            assert re.fullmatch(pattern, line), f"start {number}: {line[:300]}"


def test_every_command_is_started():
    assert set(STARTS) == {*COMMANDS, "python"}


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"policies", "models", "data"}))
def test_a_command_first_looks_at_the_memory_that_jax_reserves(
    name, folder, tmp_path, run, monkeypatch
):
    def refuse(*_: object) -> None:
        raise UserError("seen")

    monkeypatch.setattr(memory, "reserved", refuse)
    words = split(STARTS[name][0].partition(" < ")[0], folder, tmp_path)
    assert run(*words) == (2, "", "jaxkv: error: seen\n")


def test_long_silence_is_broken(capsys, monkeypatch):
    """Compiling reports nothing for minutes; a log has a line after ever longer times."""
    monkeypatch.setattr(progress, "SILENCE", 0.05)
    lines: list[str] = []
    with progress.Progress("compiling"):
        while not lines:
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
    assert set(lines) == {"compiling ... 0 s"}
    with progress.Progress("loading"):
        pass
    assert capsys.readouterr().err == ""


def test_a_font_that_is_missing_is_not_reported(capfd, caplog):
    with matplotlib.rc_context({"font.family": "a font that nobody has"}):
        figure, _ = pictures.begin()
        assert pictures.finish(figure, "a caption").startswith(b"\x89PNG")
    assert capfd.readouterr().err == "" and not caplog.records
