"""Every record has what the tables, claims, statements and pictures of its experiment read, and the
pages are those of the records."""

import importlib
import inspect
import re
import shlex

import pytest

from jaxkv.errors import UserError
from jaxkv.evals.benchmarks import past_records
from jaxkv.evals.lib import claims, experiments, figures, record, table
from jaxkv.evals.lib.run import parser_of
from jaxkv.evals.lib.verdict import HOLDS, decide
from jaxkv.models.tools import pictures
from jaxkv.policies import POLICIES

MODULES = [module for module in vars(experiments).values() if inspect.ismodule(module)]
RECORDS = {path.stem for path in record.RESULTS.glob("*.json")}
WORDS = 60  # of a row of CLAIMS.md
COMMANDS = re.findall(r"json\): `python -m (jaxkv.evals[^`]+)`", claims.RECORDS.read_text("utf-8"))
PICTURE = re.compile(r"\]\([^\s)]*results/([^\s)]+)\.png\)")
NOT_DOCS = *(record.ROOT / "evals").glob("*.md"), *(record.ROOT / "colab").glob("*.py")
UPDATE = "run python -m jaxkv.evals.lib.claims and jaxkv.evals.lib.figures"


def test_what_is_gone_has_a_record():
    assert set(past_records.GONE) <= RECORDS


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_tables_render_and_statements_hold(module):
    for make in getattr(module, "TABLES", {}).values():
        rows = [line for line in make().replace(table.BAR, "").splitlines() if line[:1] == "|"]
        assert len(rows) > 2
    for statement in getattr(module, "STATEMENTS", ()):
        page = (record.ROOT / statement.page).read_text("utf-8")
        assert statement.says in " ".join(page.split())
        cases, outcome = decide(statement, record.read(statement.record)["results"])
        assert outcome == HOLDS, (statement.says, [case for case in cases if not case.holds])


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_picture_is_drawn_from_its_record(name):
    picture = figures.FIGURES[name]
    _, axes = pictures.begin(6.4, picture.height, picture.columns)
    picture.draw(axes, record.read(picture.record)["results"])
    assert picture.title and picture.draw.__doc__  # its caption


@pytest.mark.parametrize("page, text", claims.pages().items(), ids=lambda x: getattr(x, "name", ""))
def test_a_page_of_claims_is_current(page, text):
    """Its claims are decided; a bar in a cell would start another column."""
    assert page.read_text("utf-8") == text, UPDATE
    rows = [line for line in text.replace(table.BAR, "").splitlines() if line.startswith("| ")]
    assert all(row.count("|") == 7 and len(row.split()) - 7 <= WORDS for row in rows)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_a_command_of_a_record_is_one_of_the_present_code(command):
    name, *words = shlex.split(command)
    name += ".__main__" if name.endswith("tasks") else ""
    assert parser_of(importlib.import_module(name).MEASURE).parse_args(words)


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_current(page):
    text = page.read_text("utf-8")
    assert figures.fill(text) == text, UPDATE


def test_every_table_and_picture_is_on_a_page():
    texts = [page.read_text("utf-8") for page in figures.pages()]
    names = {name for text in texts for _, name, _ in figures.TABLE.findall(text)}
    assert names == set(experiments.TABLES)
    files = [*record.ROOT.glob("*.md"), *(record.ROOT / "docs").rglob("*.md"), *NOT_DOCS]
    shown = {x for file in files for x in PICTURE.findall(file.read_text("utf-8"))}
    assert shown == {path.stem for path in record.RESULTS.glob("*.png")}
    assert figures.FIGURES.keys() <= shown


def test_every_policy_is_in_the_tables_of_all():
    for name in ("predicted", "cost"):
        rows = re.findall(r"^\| `([\w-]+)`", experiments.TABLES[name](), re.MULTILINE)
        assert rows == list(POLICIES)


@pytest.mark.parametrize("rest", ["", "<!--table cost-->\n<!--/table-->\n"])
def test_a_table_without_its_end_is_refused(rest):
    with pytest.raises(UserError, match="must end with <!--/table-->"):
        figures.fill(f"<!--table predicted-->\nwords\n{rest}")
