"""docs/serving.md names flags and metrics that exist, and its unit for systemd is valid."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxkv import defaults
from jaxkv.cli import serve
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine

PAGE = (Path(__file__).resolve().parents[3] / "docs/serving.md").read_text("utf-8")
# Of other programs, and those that the page says are absent.
OTHERS = {
    *("--no-cache-dir", "--time", "--total-queued-requests-metric"),
    *("--kv-cache-usage-percentage-metric", "--lora-info-metric", "--cache-info-metric"),
    *("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
    *("--balance-abs-threshold", "--balance-rel-threshold"),
    *("--mesh", "--api-key", "--gpu-memory-utilization", "--worker-urls"),
}


def parser() -> argparse.ArgumentParser:
    serve_parser = argparse.ArgumentParser()
    serve.add_flags(serve_parser)
    return serve_parser


def test_flags_exist():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - OTHERS
    unknown = named - set(parser()._option_string_actions)
    assert len(named) > 20 and not unknown


def test_metrics_exist():
    with serving(FakeEngine()) as served:
        served.complete("|x")
        raw = served.ask("GET", "/metrics").raw.decode()
    named = set(re.findall(r"jaxkv:[a-z]\w+", PAGE))
    assert len(named) >= 3 and all(f"\n{name} " in raw for name in named)


def block(language: str) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return code


def test_the_unit_for_systemd(tmp_path):
    unit = block("ini")
    command = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])
    args = parser().parse_args(command[2:])
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert stop > args.drain > 0, "systemd must wait until the server has drained"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    path = tmp_path / "jaxkv.service"
    path.write_text(unit.replace(command[0], "/bin/true"))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert str(path.name) not in done.stderr, done.stderr


def test_the_command_of_the_container():
    words = re.search(r"^ENTRYPOINT \[(.*)\]$", block("dockerfile"), re.MULTILINE)[1]
    command = [word.strip(' "') for word in words.split(",")]
    assert command[:2] == ["jaxkv", "serve"]
    assert parser().parse_args(command[2:]).policy == defaults.POLICY
