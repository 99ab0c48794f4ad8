"""A run that is killed, resumed, exported and read, at a small size."""

import pytest

from jaxkv.evals.training import rehearsal
from tests.models.training_data import SMALL, small, write_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optax_promotes_dtypes")]
SETTINGS = [*SMALL, "sinks=token", "save_every=5", "look_every=12"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("rehearsal"))


def words(tokens, out, *settings):
    every = [*SETTINGS, *settings]
    return ["--preset=tiny", f"--data={tokens.folder}", f"--out={out}",
            *(word for setting in every for word in ("--set", setting))]  # fmt: skip


def test_a_rehearsal_kills_resumes_and_reads(tokens, tmp_path):
    recipe, out = small(*SETTINGS), tmp_path / "run"
    found = rehearsal.rehearse(recipe, tokens, words(tokens, out), out, kill=8)
    killed = found["killed"]
    assert killed["checkpoint"] in (0, 5) and killed["after"] >= 8
    assert killed["steps_again"] == killed["after"] - killed["checkpoint"]
    assert [line["step"] for line in found["log"]] == list(range(1, 13))
    assert len(found["exported"]["loss_by_context"]) == rehearsal.CONTEXTS
    assert all(process["peak"] > 2**20 for process in found["memory"]["processes"])
    met = {one["bar"]: one["met"] for one in found["bars"]}
    assert [name for name, value in met.items() if not value] == [
        "memory of a step over its plan, minus 1"  # of a model of a few kilobytes
    ]


def test_a_failed_run_ends_the_rehearsal(tokens, tmp_path):
    wrong = words(tokens, tmp_path / "run", "rows=3", "accumulate=2")
    with pytest.raises(SystemExit, match="ended with 2"):
        rehearsal.rehearse(small(*SETTINGS), tokens, wrong, tmp_path / "run", kill=8)
