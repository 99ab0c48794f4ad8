"""Fixtures of the tests under models."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """The folder of the trained model stories260K."""
    return shared / "models" / "stories260K"
