"""The fixtures of tests/models/cli: a tiny model, and a function that runs a command."""

from tests.models.cli.conftest import model, no_keys, run

__all__ = ["model", "no_keys", "run"]
