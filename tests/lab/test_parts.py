"""Which parts of the lab run."""

import pytest

from tests.lab import parts


@pytest.mark.parametrize(
    "name, path",
    [
        ("evals/tasks", "evals/tasks/run.py"),
        ("evals/tasks", "evals/lib/record.py"),
        ("evals/tasks", "tests/lab/evals/tasks/test_run.py"),
        ("pages", "docs/results/speed.md"),
        ("notebooks", "colab/lib/runtime.py"),
        ("real model", "models/loading/gguf/header.py"),
    ],
)
def test_a_part_runs_when_its_files_changed(name, path):
    assert parts.reason(parts.PARTS[name], ["LICENSE", path]) == f"{path} changed"
    assert parts.reason(parts.PARTS[name], ["jaxkv/driver.py", "evals/benchmarks/soak.py"]) == ""


def test_tests_of_other_tiers_run_none_of_the_lab():
    for part in parts.PARTS.values():
        assert parts.reason(part, ["tests/core/test_driver.py", "tests/models/test_llm.py"]) == ""


def test_every_part_runs_where_nothing_is_known_to_have_passed():
    assert all(parts.reason(part, None) for part in parts.PARTS.values())
    assert parts.changed_since("0" * 40) is None


def test_every_test_of_the_lab_is_in_a_part():
    folder = parts.ROOT / "tests/lab"
    tests = {str(path.relative_to(parts.ROOT)) for path in folder.rglob("test_*.py")}
    beginnings = tuple(test for part in parts.PARTS.values() for test in part.tests)
    assert not [test for test in tests if not test.startswith(beginnings)]
    assert not [test for test in beginnings if not (parts.ROOT / test).exists()]


def test_a_part_that_passed_is_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(parts, "PASSED", tmp_path / "passed.json")
    assert parts.chosen(everything=False) == list(parts.PARTS)
    head = parts.git("rev-parse", "HEAD").strip()
    parts.PASSED.write_text(f'{{"notebooks": "{head}"}}')
    assert "notebooks" not in parts.chosen(everything=False)
    assert f"notebooks: left out, unchanged since {head[:8]}" in capsys.readouterr().out
    assert "notebooks" in parts.chosen(everything=True)
