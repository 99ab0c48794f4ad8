"""Signs of self-balancing walks over blocks of tokens (Alweiss, Liu, Sawhney 2021)."""

from jaxkv.pallas_kernels.sign_walk.api import NO_STEP, Walk, balance_walk

__all__ = ["NO_STEP", "Walk", "balance_walk"]
