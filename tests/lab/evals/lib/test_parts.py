"""Parts of a long experiment survive an interruption, with the commit that computed them."""

import jax
import numpy as np
import pytest

from jaxkv.evals.lib import memory_maps, parts, record


def test_a_part_is_computed_once(trials, capsys):
    trial = record.Record("trial", quick=True)
    trial.about |= {"commit": "first", "dirty": False}
    run = parts.Parts(trial, 2)
    assert run.part("a/b", lambda: np.arange(3)).tolist() == [0, 1, 2]
    assert "part 1 of 2, a/b" in capsys.readouterr().out
    trial.about |= {"commit": "second", "dirty": True}
    again = parts.Parts(trial, 2)
    assert again.part("a/b", lambda: pytest.fail("computed again")).tolist() == [0, 1, 2]
    again.part("c", lambda: np.zeros(1))
    assert again.commits == {"first": 1, "second+": 1}


def test_an_interrupted_part_leaves_nothing(trials):
    run = parts.Parts(record.Record("trial", quick=True), 1)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.part("a", interrupted)
    assert run.part("a", lambda: np.ones(2)).tolist() == [1, 1]


def test_programs_are_released_before_the_memory_maps_run_out(tmp_path, monkeypatch):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    monkeypatch.setattr(memory_maps, "MAPS", tmp_path / "maps")
    assert not memory_maps.release()  # another system
    for lines in (memory_maps.MAX_MAPS, memory_maps.MAX_MAPS + 1):
        (tmp_path / "maps").write_bytes(b"line\n" * lines)
        assert memory_maps.release() == (lines > memory_maps.MAX_MAPS) == bool(cleared)
