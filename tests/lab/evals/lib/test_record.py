"""Records: written atomically, and independent of the machine's paths."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.evals.lib import record
from jaxkv.evals.lib.record import Record, plain, run_command, spread
from jaxkv.models.tools.run_metadata import portable

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setenv("JAXKV_COMMIT", "0" * 40)  # for tests outside a checkout
    return tmp_path


def test_a_record_has_commit_command_data_and_versions(results, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["x", "--model", str(ROOT.parent / "shared" / "m"), "--n", "3"]
    )
    data = results / "text.txt"
    data.write_text("abc")
    Record("trial", [data], seeds=[0, 1]).save({"x": spread([1.0, 2.0, 4.0])})
    saved = json.loads((results / "trial.json").read_text())
    assert saved["command"].endswith("--model ../shared/m --n 3")
    assert {"commit", "dirty", "date", "device", "cpu", "versions", "seeds", "data"} <= set(saved)
    assert saved["results"]["x"] == {"median": 2.0, "min": 1.0, "max": 4.0, "n": 3}
    # The sha256 of "abc".
    assert [h[:8] for h in saved["data"].values()] == ["ba7816bf"]
    assert f"{ROOT.parent}/" not in json.dumps(saved)


def test_a_record_is_written_atomically(results):
    run = Record("trial")
    run.save({"x": 1})
    before = (results / "trial.json").read_text()
    with pytest.raises(ValueError):
        run.save({"x": float("nan")})
    assert (results / "trial.json").read_text() == before
    assert [path.name for path in results.iterdir()] == ["trial.json"]


def test_a_record_has_a_commit(results, monkeypatch):
    monkeypatch.setattr("jaxkv.models.tools.run_metadata._git", lambda *words: "")
    assert Record("trial").about["commit"] == "0" * 40
    monkeypatch.delenv("JAXKV_COMMIT")
    with pytest.raises(UserError, match="JAXKV_COMMIT"):
        Record("trial")
    Record("trial", quick=True)


def test_paths_are_relative_to_the_repository_or_bare_names():
    assert portable(ROOT / "evals" / "x.py") == "evals/x.py"
    assert portable(ROOT.parent / "shared" / "x") == "../shared/x"
    assert portable(Path("/far/away/models/x")) == "models/x"
    assert portable(Path("here/x").resolve().relative_to(Path.cwd())) == "here/x"


def test_numbers_become_json_types():
    value = plain({"a": np.float32(1 / 3), "b": (np.int64(2), np.bool_(True)), 3: [None, "x"]})
    assert value == {"a": 0.3333333, "b": [2, True], "3": [None, "x"]}
    assert type(value["b"][1]) is bool


def test_no_result_names_a_machine():
    for file in (ROOT / "evals" / "results").glob("*.json"):
        about = json.loads(file.read_text("utf-8"))
        assert not any(word.startswith("/") for word in about["command"].split()), file.name
        assert not any(name.startswith("/") for name in about["data"]), file.name


def test_a_record_is_written_before_its_bars_are_printed(results, monkeypatch, capsys):
    monkeypatch.setattr(record, "TRIALS", results / "trials")
    line = {"bar": "speed", "value": {"median": 2.0}, "ask": ">= 3", "met": False}
    Record("trial", quick=True).finish({"bars": [line]})
    file = results / "trials" / "trial.json"
    assert capsys.readouterr().out == f"wrote {file}\nNOT MET speed: 2 >= 3\n"


def test_an_error_of_the_user_is_one_line_and_a_bug_is_not(capsys, tmp_path):
    def refuse():
        raise UserError("--rounds must be at least 1, got 0; give more")

    for main, line in (
        (refuse, "error: --rounds must be at least 1, got 0; give more\n"),
        ((tmp_path / "no").read_text, f"error: {tmp_path / 'no'}: No such file or directory"),
    ):
        with pytest.raises(SystemExit) as end:
            run_command(main)
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.startswith(line) and said.count("\n") == 1

    def lose():
        raise ConnectionResetError(104, "Connection reset by peer")

    for bug, main in ((ConnectionResetError, lose), (ZeroDivisionError, lambda: 1 / 0)):
        with pytest.raises(bug):
            run_command(main)
