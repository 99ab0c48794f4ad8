"""The notebooks under colab/: equal to their sources, small, and correct when they run."""

from __future__ import annotations

import ast
import json
import re
import threading

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from jaxkv.colab import notebooks, runtime
from jaxkv.colab.notebooks import BADGE, FOLDER, REPOSITORY, tags
from jaxkv.errors import UserError

NAMES = [path.stem for path in notebooks.sources()]
INSTALL = f'%pip install -q "jaxkv[serve,train] @ git+{REPOSITORY}"'
LONGEST_CELL, LONGEST_FUNCTION, LARGEST = 17, 12, 100_000  # lines, lines, bytes


def cells(name):
    return notebooks.load(name).cells


def code(name):
    return [cell for cell in cells(name) if cell.cell_type == "code"]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_every_source_has_its_notebook_and_a_link_in_the_readme():
    assert NAMES and {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)
    text = (notebooks.ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"\(colab/(\w+)\.ipynb\)", text) == NAMES


def test_a_notebook_has_the_cells_of_its_source(name):
    kept = nbformat.read(FOLDER / f"{name}.ipynb", 4).cells
    assert [(cell.cell_type, cell.source, tags(cell)) for cell in kept] == [
        (cell.cell_type, cell.source, tags(cell)) for cell in cells(name)
    ], f"python -m jaxkv.colab.notebooks {name}"


def test_a_saved_notebook_is_small_and_complete(name):
    file = FOLDER / f"{name}.ipynb"
    assert file.stat().st_size <= LARGEST
    *_, last = [cell for cell in nbformat.read(file, 4).cells if cell.cell_type == "code"]
    reported = last.outputs[-1]["text"].splitlines()
    assert reported and all(line.startswith("holds  ") for line in reported)
    text = file.read_text("utf-8")
    assert "the small model of the package is used" not in text  # runtime.default_model prints it
    assert "JAXKV_SMOKE" not in text and '"output_type": "error"' not in text
    picture = notebooks.picture_of(nbformat.read(file, 4))
    assert (FOLDER / f"{name}.png").read_bytes() == picture


def test_the_first_cells_are_badge_install_and_device(name):
    first, install, check = cells(name)[:3]
    assert f"]({BADGE}{name}.ipynb)" in first.source.splitlines()[0]
    assert (install.source, tags(install)) == (INSTALL, ["install"])
    assert check.source == f'from jaxkv.colab import runtime\n\nruntime.begin("{name}")'


def test_relative_links_exist(name):
    text = "\n".join(cell.source for cell in cells(name) if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / link).exists(), link


def test_the_checks_are_last_and_folded(name):
    """In Colab (a form with its title) and in Jupyter, in the source and in the saved notebook."""
    for kept in (notebooks.load(name), nbformat.read(FOLDER / f"{name}.ipynb", 4)):
        *code_cells, last = [cell for cell in kept.cells if cell.cell_type == "code"]
        assert "runtime.verify(" in last.source and last.source.startswith("# @title Checks\n")
        assert last.metadata["cellView"] == "form" and last.metadata["jupyter"]["source_hidden"]
        assert not any("runtime.verify(" in cell.source for cell in code_cells)


def test_a_reader_copies_short_cells_and_functions(name):
    """The checks at the end and a policy may be longer."""
    for number, cell in enumerate(code(name)[:-1]):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= LONGEST_CELL or "(jaxkv.Policy):" in cell.source, cell.source
        for node in ast.walk(ast.parse(cell.source if number else "")):  # the first is %pip
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < LONGEST_FUNCTION, node.name


def test_a_policy_takes_about_ten_lines():
    """Lines in the bodies of its methods, as the README counts them."""
    source = "\n".join(cell.source for cell in code("06_write_your_own_policy")[1:])
    (policy,) = (node for node in ast.walk(ast.parse(source))
                 if isinstance(node, ast.ClassDef) and node.name == "Strided")  # fmt: skip
    bodies = [node for node in policy.body if isinstance(node, ast.FunctionDef)]
    lines = sum(node.end_lineno - node.body[0].lineno + 1 for node in bodies)
    assert len(bodies) >= 4 and 8 <= lines <= 12


@pytest.mark.slow
def test_a_notebook_runs_with_another_model(shared):
    """Checks of the default model's results need not hold, but nothing raises.

    `.ci/run` runs every notebook with the default model.
    """
    model = str(shared / "models" / "stories260K")
    notebooks.run("06_write_your_own_policy", smoke=True, model=model)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a notebook of one cell into an empty folder."""
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)

    def write(content):
        (tmp_path / "00_small.py").write_text(f"# %%\n{content}\n")
        return "00_small"

    return write


def test_a_wrong_result_ends_the_run(written):
    with pytest.raises(CellExecutionError, match="one is not two"):
        notebooks.run(written('assert 1 == 2, "one is not two"'), smoke=True)


def test_an_install_cell_that_changes_packages_ends_the_run(written, monkeypatch):
    versions = iter([{"jax": "0.7.2", "numpy": "2.0.2"}, {"jax": "0.11.0", "numpy": "2.0.2"}])
    monkeypatch.setattr(notebooks, "packages", lambda: next(versions))
    name, installed = written('1\n# %% tags=["install"]\n2'), threading.Event()
    with pytest.raises(RuntimeError, match=r"changed jax$"):
        notebooks.run(name, smoke=True, install=True, installed=installed)
    assert installed.is_set()


@pytest.mark.parametrize("fails", [False, True])
def test_other_notebooks_run_once_the_first_has_installed(monkeypatch, fails):
    started = []

    def run(name, installed=None, **_):
        started.append(name)
        if fails:
            raise RuntimeError(f"{name} fails")
        if installed:
            assert started == NAMES[:1]
            installed.set()
        return None, 0.0

    monkeypatch.setattr(notebooks, "run", run)
    monkeypatch.setattr("sys.argv", ["notebooks", "--smoke", "--install"])
    if fails:
        with pytest.raises(SystemExit, match="fails"):
            notebooks.main()
    else:
        notebooks.main()
        assert sorted(started) == NAMES


def test_the_model_field_accepts_another_model(written):
    name = written('MODEL = ""  # @param {type: "string"}\nprint("it is", MODEL)')
    notebook, _ = notebooks.run(name, smoke=True, model="a/model")
    assert notebook.cells[0].outputs[0]["text"] == "it is a/model\n"
    assert notebook.cells[0].source.startswith('MODEL = ""')


def test_only_the_third_cell_is_updated_with_run_times(written, tmp_path):
    name = written("1\n# %%\n2\n# %%\nprint('now')\n# %%\n4")
    before = notebooks.load(name)
    for cell in before.cells:
        cell.outputs = [nbformat.v4.new_output("stream", text="before")]
    nbformat.write(before, tmp_path / f"{name}.ipynb")
    notebooks.update_run_times(name)
    after = nbformat.read(tmp_path / f"{name}.ipynb", 4)
    reported = [cell.outputs[0]["text"].strip() for cell in after.cells]
    assert reported == ["before", "before", "now", "before"]


def test_a_notebook_runs_the_installed_package(written, monkeypatch, tmp_path):
    """In an empty folder, without PYTHONPATH, and with JAXKV_SMOKE set."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    say = "import os; print(os.getcwd(), os.environ.get('PYTHONPATH'), os.environ['JAXKV_SMOKE'])"
    notebook, _ = notebooks.run(written(say), smoke=True)
    folder, path, smoke = notebook.cells[0].outputs[0]["text"].split()
    assert (path, smoke) == ("None", "1") and folder != str(notebooks.ROOT)


def test_an_accelerator_that_jax_does_not_use_raises():
    for platform, attached, requested in (
        ("gpu", "GPU", ""),
        ("cpu", "", ""),
        ("cpu", "GPU", "cpu"),
    ):
        runtime.check_platform(platform, attached, requested)
    with pytest.raises(UserError, match="the TPU of this runtime"):
        runtime.check_platform("cpu", "TPU", "")


@pytest.mark.parametrize("script, accelerator", [
    ("echo 'GPU 0: Tesla T4 (UUID: GPU-1)'", "GPU"),
    ("echo 'No devices were found'; exit 6", ""),
    ("exit 9", ""),
])  # fmt: skip
def test_a_gpu_counts_only_if_the_driver_lists_it(tmp_path, monkeypatch, script, accelerator):
    """Some images contain nvidia-smi without a GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtime.has_gpu() == (accelerator == "GPU")
    assert runtime.accelerator() == accelerator


def test_a_google_network_card_is_not_a_tpu(tmp_path):
    (tmp_path / "0000:00:04.0").mkdir()
    pairs = (
        (("0x1ae0", "0x0063"), True),
        (("0x1ae0", "0x0042"), False),
        (("0x10de", "0x0063"), False),
    )
    for ids, is_tpu in pairs:
        for name, value in zip(("vendor", "device"), ids, strict=True):
            (tmp_path / "0000:00:04.0" / name).write_text(f"{value}\n")
        assert runtime.has_tpu(tmp_path) == is_tpu


@pytest.mark.parametrize("model, platform, checks, failed", [
    ("", "cpu", ({"a": True}, {"b": True}, {"c": True}), ""),
    ("", "cpu", ({"a": True}, {"b": False}, {}), "b"),
    ("a/model", "cpu", ({"a": True}, {"b": False}, {"c": False}), ""),
    ("a/model", "cpu", ({"a": False}, {}, {}), "a"),
    ("", "cpu", ({"a": True}, {}, {"c": False}), "c"),
    ("", "gpu", ({"a": True}, {}, {"c": False}), ""),
])  # fmt: skip
def test_a_required_check_that_fails_ends_a_notebook(
    capsys, monkeypatch, model, platform, checks, failed
):
    """Another model decides nothing of the default model, another device nothing of times."""
    monkeypatch.setattr("jax.default_backend", lambda: platform)
    if failed:
        with pytest.raises(AssertionError, match=f"must hold: {failed}"):
            runtime.verify(model, *checks)
    else:
        runtime.verify(model, *checks)
    assert ("FAILS" in capsys.readouterr().out) == bool(failed)


def test_run_times_come_from_the_records_of_each_device(tmp_path, monkeypatch):
    devices = (("2 cores of a processor", "cpu", 1.26), ("1 x Tesla T4", "gpu", 0.51),
               ("1 x NVIDIA A100", "gpu", 0.4))  # fmt: skip
    recorded = {
        device: {"platform": platform, "notebooks": {"01_one": {"minutes": took}}}
        for device, platform, took in devices
    }
    (tmp_path / "times.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(runtime, "RUN_TIMES", tmp_path / "times.json")
    assert runtime.run_times("01_one") == [
        "on 2 cores of a processor: 1.3 minutes", "on 1 x Tesla T4: 0.5 minutes",
        "on 1 x NVIDIA A100: 0.4 minutes", "on a TPU: not timed yet",
    ]  # fmt: skip
    assert runtime.run_times("02_other")[0] == "on a CPU: not timed yet"


def test_every_run_time_is_that_of_a_notebook():
    devices = json.loads(runtime.RUN_TIMES.read_text("utf-8")).values()
    assert {name for record in devices for name in record["notebooks"]} <= set(NAMES)


def test_a_passage_shorter_than_requested_prints_a_line(capsys):
    from jaxkv import models

    llm = models.load()
    assert runtime.passage(llm, 5)[0] == llm.config.bos
    assert not capsys.readouterr().out
    every = runtime.passage(llm, 10**6)
    assert 15_000 < len(every) < 10**6
    assert f"all {len(every):,} tokens" in capsys.readouterr().out
