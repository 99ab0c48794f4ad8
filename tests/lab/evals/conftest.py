"""What tests of experiments share: a tiny model, and a folder for records and parts."""

import pytest

from jaxkv import models
from jaxkv.evals.lib import parts, record
from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    """Two layers of random weights and a byte tokenizer."""
    return models.load(write_tiny(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """The folder where quick runs write."""
    for module in (parts, record):
        monkeypatch.setattr(module, "TRIALS", tmp_path / "trials")
    return tmp_path / "trials"
