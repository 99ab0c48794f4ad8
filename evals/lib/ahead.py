"""Compiles programs ahead of time for a TPU or an NVIDIA GPU, on a machine without one."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, Sharding

from jaxkv.contract import State
from jaxkv.evals.lib.record import ROOT
from jaxkv.models.generation.decoding import Decoding
from jaxkv.models.network.config import Config

LIBTPU = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # libtpu aborts on flags of XLA:CPU
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

H100_KIND = "NVIDIA H100 80GB HBM3"
# What the compiler asks about an H100: its compute capability, sizes and speeds.
H100 = """
platform_name: "CUDA"
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_memory_size: 80000000000
  memory_bandwidth: 3350000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  runtime_version: "12.9.0"
  driver_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
}
"""


def h100() -> jax.Device:
    """An H100 to compile for, without a GPU. Needs the extra gpu-check."""
    options = {"topology": "1x1x1", "target_config": H100}
    return topologies.get_topology_desc("h100", "cuda", **options).devices[0]


def abstract_h100() -> AbstractContextManager[Any]:
    """An abstract GPU. From jax 0.12 on, Triton cannot be lowered without it or a real GPU."""
    kind = getattr(jax.sharding, "AbstractDevice", None)
    if kind is None or "platform" not in inspect.signature(kind).parameters:
        return contextlib.nullcontext()
    device = kind(device_kind=H100_KIND, num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("one",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def triton_for_h100() -> AbstractContextManager[Any]:
    """Lower Triton kernels for an H100 in a program whose arguments have a device.

    Such a program cannot be traced under `abstract_h100`, and lowering does not see it, so this
    replaces what Triton in JAX asks the local device. It needs jax 0.12 or later.
    """
    name = "jax._src.pallas.triton.gpu_info.get_device_kind"
    return mock.patch(name, lambda: H100_KIND)


def v5e() -> jax.Device:
    """A TPU v5e to compile for, without a TPU. Needs the extra tpu-check, and LIBTPU."""
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


def v5e_8() -> Mesh:
    """Eight TPU v5e to compile for, over which a model is split."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,), devices=devices)


def shapes_of_decoding(
    config: Config, states: tuple[State, ...], batch: int = 1, place: Sharding | None = None
) -> Decoding:
    """The shapes of a batch in decode, for a program that is compiled and not run."""
    array = partial(jax.ShapeDtypeStruct, sharding=place)
    return Decoding(
        states=states,
        logits=array((batch, config.vocab), jnp.float32),
        position=array((batch,), jnp.uint32),
        done=array((batch,), jnp.bool_),
        seen=array((batch, config.vocab), jnp.bool_),
        rng=array((batch, 2), jnp.uint32),
    )


def reports_of(module: str, *words: str) -> list[dict[str, Any]]:
    """Run a module in a new process and parse the JSON lines that it prints.

    A new process is needed because libtpu reads its settings at the import of jax.
    """
    result = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=ROOT, env=os.environ | LIBTPU,
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]
