"""The promotion that other libraries need."""

import jax
import pytest


@pytest.fixture(autouse=True)
def promotion():
    """They add numbers of several types and shapes, in threads of their own too."""
    allowed = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: getattr(jax.config, name) for name in allowed}
    for name, value in allowed.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
