"""The notebooks under colab/: in step with their sources, small, and right when they run."""

from __future__ import annotations

import ast
import json
import re

import jupytext
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from evals import notebooks, runtime
from evals.notebooks import BADGE, FOLDER, REPOSITORY, tags
from jaxkv.errors import UserError

NAMES = [path.stem for path in notebooks.sources()]
INSTALL = f'%pip install -q "jaxkv[colab] @ git+{REPOSITORY}"'
LONGEST_FUNCTION, LARGEST = 10, 100_000  # lines, bytes


def cells(name):
    return notebooks.load(name).cells


def code(name):
    return [cell for cell in cells(name) if cell.cell_type == "code"]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_every_source_has_its_notebook():
    assert NAMES and {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


def test_a_notebook_has_the_cells_of_its_source(name):
    kept = nbformat.read(FOLDER / f"{name}.ipynb", 4).cells
    assert [(cell.cell_type, cell.source, tags(cell)) for cell in kept] == [
        (cell.cell_type, cell.source, tags(cell)) for cell in cells(name)
    ], f"python -m evals.notebooks {name}"


def test_what_is_kept_is_small_and_whole(name):
    file = FOLDER / f"{name}.ipynb"
    assert file.stat().st_size <= LARGEST
    *_, last = [cell for cell in nbformat.read(file, 4).cells if cell.cell_type == "code"]
    assert last.outputs[-1]["text"] == "as it should be\n"
    text = file.read_text("utf-8")
    assert "JAXKV_SMOKE" not in text and '"output_type": "error"' not in text


def test_its_picture_is_what_it_drew(name):
    kept = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    assert (FOLDER / f"{name}.png").read_bytes() == notebooks.picture_of(kept)


def test_readme_shows_it(name):
    text = (notebooks.ROOT / "README.md").read_text("utf-8")
    assert f"{BADGE}{name}.ipynb" in text and f"colab/{name}.ipynb" in text
    assert f'src="colab/{name}.png"' in text


def test_the_first_cells(name):
    """The badge leads to this file; nothing is installed but jaxkv; then it says where it runs."""
    first, install, check = cells(name)[:3]
    assert f"]({BADGE}{name}.ipynb)" in first.source.splitlines()[0]
    assert (install.source, tags(install)) == (INSTALL, ["install"])
    assert check.source == f'from evals import runtime\n\nruntime.begin("{name}")'


def test_links_lead_somewhere(name):
    text = "\n".join(cell.source for cell in cells(name) if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / link).exists(), link


def test_functions_of_notebooks_are_short(name):
    for cell in code(name)[1:]:
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < LONGEST_FUNCTION, node.name


@pytest.mark.slow
def test_it_runs(name):
    notebooks.run(name, smoke=True)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a notebook of one cell in a folder of its own."""
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)

    def write(content):
        (tmp_path / "00_small.py").write_text(f"# %%\n{content}\n")
        return "00_small"

    return write


def test_a_wrong_result_ends_the_run(written):
    with pytest.raises(CellExecutionError, match="one is not two"):
        notebooks.run(written('assert 1 == 2, "one is not two"'), smoke=True)


def test_the_third_cell_tells_what_is_known_in_the_end(written, tmp_path):
    name = written("1\n# %%\n2\n# %%\nprint('now')\n# %%\n4")
    before = notebooks.load(name)
    for cell in before.cells:
        cell.outputs = [nbformat.v4.new_output("stream", text="before")]
    nbformat.write(before, tmp_path / f"{name}.ipynb")
    notebooks.tell_minutes(name)
    after = nbformat.read(tmp_path / f"{name}.ipynb", 4)
    told = [cell.outputs[0]["text"].strip() for cell in after.cells]
    assert told == ["before", "before", "now", "before"]


def test_what_runs_is_what_is_installed(written, monkeypatch, tmp_path):
    """No folder of the caller's, no PYTHONPATH; and it is told how large to be."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    say = "import os; print(os.getcwd(), os.environ.get('PYTHONPATH'), os.environ['JAXKV_SMOKE'])"
    notebook, _ = notebooks.run(written(say), smoke=True)
    folder, path, smoke = notebook.cells[0].outputs[0]["text"].split()
    assert (path, smoke) == ("None", "1") and folder != str(notebooks.ROOT)


def test_magics_survive_the_pairing(written):
    (cell,) = jupytext.reads("# %%\n# %pip install x\n", fmt="py:percent").cells
    assert cell.source == "%pip install x"


@pytest.mark.parametrize("found, there, asked", [
    ("gpu", "GPU", ""), ("cpu", "", ""), ("cpu", "GPU", "cpu"), ("tpu", "TPU", ""),
])  # fmt: skip
def test_a_runtime_that_is_as_it_seems(found, there, asked):
    runtime.check(found, there, asked)


@pytest.mark.parametrize("there", ["GPU", "TPU"])
def test_an_accelerator_that_jax_does_not_use_is_told(there):
    with pytest.raises(UserError, match=f"the {there} of this runtime"):
        runtime.check("cpu", there, "")


def test_minutes_are_those_that_were_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    record = {"cpu": {"model": "a processor", "cores": 2}, "device": "cpu: cpu",
              "results": {"minutes": {"01_one": 1.26}}}  # fmt: skip
    (tmp_path / "results" / "notebooks_cpu.json").write_text(json.dumps(record))
    of_cpu, of_gpu, _ = runtime.minutes("01_one")
    assert of_cpu == "on a CPU: 1.3 minutes (2 cores of a processor)"
    assert of_gpu == "on a GPU: not measured yet"
    assert runtime.minutes("02_other")[0] == "on a CPU: not measured yet"


def test_a_table_keeps_its_columns():
    shown = runtime.Text("a  < b\n1    2")
    assert repr(shown) == "a  < b\n1    2"
    assert ">a  &lt; b\n1    2</pre>" in shown._repr_html_()


def test_the_passage_is_as_long_as_it_is(monkeypatch):
    import models

    llm = models.load()
    assert runtime.passage(llm, 5)[0] == llm.config.bos
    with pytest.raises(UserError, match="ask for fewer"):
        runtime.passage(llm, 10**6)


def test_a_picture_keeps_its_colours():
    from io import BytesIO

    from PIL import Image

    figure, axes = runtime.axes()
    axes.plot([0, 1], [0, 1], color="#0072b2", lw=9)
    made = runtime.picture(figure, "a caption")
    with Image.open(BytesIO(made._repr_png_())) as image:
        found = [rgb for _, rgb in image.convert("RGB").getcolors(1 << 20)]
    off = [max(abs(a - b) for a, b in zip(rgb, (0, 0x72, 0xB2), strict=True)) for rgb in found]
    assert min(off) < 6 and len(made.png) < 20_000
