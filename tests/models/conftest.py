"""Fixtures for tests of jaxkv.models."""

from pathlib import Path

import pytest

from jaxkv import models
from jaxkv.models.training.data import DataFolder
from tests.models.training_data import write_tokens
from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """The folder of the trained model stories260K."""
    return shared / "models" / "stories260K"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random model with 4 KV heads, a trained context of 96 tokens and two EOS ids."""
    return write_tiny(
        tmp_path_factory.mktemp("tiny"),
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=96,
        eos_token_id=[1, 7],
    )


@pytest.fixture(scope="session")
def tiny(tiny_folder) -> models.Llm:
    """The model of `tiny_folder`."""
    return models.load(tiny_folder)


@pytest.fixture(scope="session")
def llm_folder(tmp_path_factory) -> Path:
    """A random model with the sizes of `write_tiny`: 2 KV heads, a trained context of 512."""
    return write_tiny(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="session")
def llm(llm_folder) -> models.Llm:
    """The model of `llm_folder`."""
    return models.load(llm_folder)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> DataFolder:
    """A small data folder."""
    return write_tokens(tmp_path_factory.mktemp("data"))
