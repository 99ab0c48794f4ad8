"""An engine that the tests of one file share."""

from __future__ import annotations

import pytest

from jaxkv.engine import Engine
from tests.engine.plain import plain


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(plain(), max_batch=4, chunk=16, max_prefill_tokens=32)
