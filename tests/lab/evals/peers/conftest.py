import pytest

from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny model."""
    return write_tiny(tmp_path_factory.mktemp("rates") / "model")
