"""A case that every day another shows nearly as well, and CI alone runs."""

import pytest


def seldom(*values, **named):
    return pytest.param(*values, marks=pytest.mark.slow, **named)
