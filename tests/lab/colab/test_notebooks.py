"""The notebooks under colab/: equal to their sources, small, and correct when they run."""

from __future__ import annotations

import ast
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
INSTALL_TUNIX = (  # a newer jax would not match the plug-in of the accelerator
    f'%pip install -q "jaxkv[models,tunix] @ git+{REPOSITORY}" jax=={{version("jax")}}'
)
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
    if name in notebooks.NEEDS:
        assert install.source.splitlines()[-1] == INSTALL_TUNIX
    else:
        assert install.source == INSTALL
    assert tags(install) == ["install"]
    assert check.source == f'from jaxkv.colab import runtime\n\nruntime.begin("{name}")'


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


def test_a_notebook_runs_with_another_model(shared):
    """Checks of the default model's results need not hold, but nothing raises.

    `.ci/run` runs every notebook with the default model.
    """
    model = str(shared / "models" / "stories260K")
    notebooks.run("06_write_your_own_policy", smoke=True, model=model)


def test_a_notebook_without_its_module_is_left_out(monkeypatch, capsys):
    others = [name for name in NAMES if name not in notebooks.NEEDS]
    for spec, names in ((None, others), (object(), NAMES)):
        monkeypatch.setattr(notebooks, "find_spec", lambda _, spec=spec: spec)
        assert notebooks.runnable(NAMES) == names
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "09_bounded_rollouts is left out, because tunix is not installed"


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


def test_the_model_field_accepts_another_model(written):
    name = written('MODEL = ""  # @param {type: "string"}\nprint("it is", MODEL)')
    notebook, _ = notebooks.run(name, smoke=True, model="a/model")
    assert notebook.cells[0].outputs[0]["text"] == "it is a/model\n"
    assert notebook.cells[0].source.startswith('MODEL = ""')


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
