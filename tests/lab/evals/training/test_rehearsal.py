"""A run that is killed, resumed, exported and read, at a small size."""

import pytest

from jaxkv.evals.training import rehearsal
from tests.models.training_data import SMALL, small, write_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optax_promotes_dtypes")]
SETTINGS = [*SMALL, "sink_variant=token", "steps=400", "save_every=20", "eval_every=400"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("rehearsal"))


def words(tokens, out, *settings):
    every = [*SETTINGS, *settings]
    return ["--preset=tiny", f"--data={tokens.folder}", f"--out={out}",
            *(word for setting in every for word in ("--set", setting))]  # fmt: skip


def test_a_rehearsal_kills_resumes_and_reads(tokens, tmp_path):
    recipe, out = small(*SETTINGS), tmp_path / "run"
    results = rehearsal.rehearse(recipe, tokens, words(tokens, out), out, kill=30)
    killed = results["killed"]
    assert killed["checkpoint"] % 20 == 0 < killed["checkpoint"] and killed["after"] >= 30
    assert killed["steps_again"] == killed["after"] - killed["checkpoint"] > 0
    assert [line["step"] for line in results["log"]] == list(range(1, 401))
    assert len(results["exported"]["loss_by_context"]) == rehearsal.CONTEXTS
    assert all(process["peak"] > 2**20 for process in results["memory"]["processes"])
    assert [bar["met"] for bar in results["bars"]] == [True, True]


def test_a_failed_run_ends_the_rehearsal(tokens, tmp_path):
    wrong = words(tokens, tmp_path / "run", "batch_size=3", "grad_accum_steps=2")
    with pytest.raises(SystemExit, match="ended with 2"):
        rehearsal.rehearse(small(*SETTINGS), tokens, wrong, tmp_path / "run", kill=30)
