"""Marks a parametrized case as slow: only CI runs it, because another case is nearly the same."""

import pytest


def seldom(*values, **named):
    return pytest.param(*values, marks=pytest.mark.slow, **named)
