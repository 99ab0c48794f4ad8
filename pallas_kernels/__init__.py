"""Pallas kernels, a folder each, beside the XLA reference that defines what they compute."""

from __future__ import annotations


def import_pallas() -> None:
    """Import Pallas, which takes a quarter of a second; policies with a kernel call this when made.

    The import adds settings to the context in which JAX traces. Programs that were compiled before
    it would be compiled again.
    """
    import jax.experimental.pallas
    import jax.experimental.pallas.tpu
    import jax.experimental.pallas.triton  # noqa: F401
