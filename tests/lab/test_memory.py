"""Free memory, and the error before an allocation that exceeds it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxkv.errors import UserError
from jaxkv.state import memory


@pytest.fixture
def device(monkeypatch):
    """A function that makes the first device one of this platform with these memory stats."""

    def use(platform: str = "gpu", **stats: int | None) -> None:
        fake = SimpleNamespace(platform=platform, memory_stats=lambda: stats or None)
        monkeypatch.setattr(memory.jax, "local_devices", lambda: [fake])

    return use


def test_free_bytes_of_a_device(device):
    device(bytes_limit=100, bytes_in_use=30)
    assert memory.available() == 70
    device(bytes_limit=100)
    assert memory.available() == 100


@pytest.mark.parametrize("stats", [{}, {"bytes_in_use": 5}])
def test_a_device_without_a_limit_is_not_checked(stats, device):
    device(**stats)
    assert memory.available() is None
    memory.check(10**18, "a cache")


NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE, ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"


@pytest.mark.parametrize(
    ("platform", "limit", "environment", "advice"),
    [
        ("gpu", 60 << 30, {}, f"60.0 GiB of each GPU's memory; set {NEW} below 0.75 "),
        ("gpu", 8 << 30, {NEW: ".1"}, f"8.0 GiB of each GPU's memory; set {NEW} below .1 "),
        ("gpu", 8 << 30, {OLD: "0.9"}, f"8.0 GiB of each GPU's memory; set {OLD} below 0.9 "),
        ("gpu", 8 << 30, {OLD: "", PREALLOCATE: "true"}, f"set {NEW} below 0.75 "),
        ("gpu", 8 << 30, {ALLOCATOR: "BFC"}, f"set {NEW} below 0.75 "),
        ("gpu", 8 << 30, {PREALLOCATE: "false"}, None),
        ("gpu", 8 << 30, {PREALLOCATE: "0"}, None),
        ("gpu", 8 << 30, {ALLOCATOR: "platform"}, None),
        ("gpu", None, {}, None),
        ("cpu", 8 << 30, {}, None),
        ("tpu", 8 << 30, {}, None),
    ],
)
def test_the_memory_that_jax_reserves(platform, limit, environment, advice):
    sentence = memory.reserved(platform, limit, environment)
    assert (sentence is None) == (advice is None)
    assert advice is None or (advice in sentence and f"or {PREALLOCATE}=false" in sentence)


def test_free_bytes_of_the_host(device, monkeypatch):
    free = memory.available()
    assert 2**20 < free < 2**50
    device("cpu", bytes_limit=5)  # a CPU device ignores these
    assert memory.available() == pytest.approx(free, rel=0.5)
    monkeypatch.setattr(Path, "exists", lambda self: False)  # no /proc: macOS
    assert memory.available() > free / 2
    monkeypatch.setattr(memory, "_GROUPS", [])
    monkeypatch.delattr("os.sysconf")  # no sysconf: Windows
    assert memory.available() is None


def test_free_bytes_of_a_container(device, monkeypatch, tmp_path):
    """Its limit applies; its file cache counts as free."""
    device("cpu")
    host = memory.available()
    for _, limit_file, used, prefix in memory._GROUPS:
        group = tmp_path / prefix
        group.mkdir(exist_ok=True)
        monkeypatch.setattr(memory, "_GROUPS", [(group, limit_file, used, prefix)])
        assert memory.available() == pytest.approx(host, rel=0.5)
        (group / limit_file).write_text("max\n")
        (group / used).write_text("9000\n")
        (group / "memory.stat").write_text(
            f"anon 1\n{prefix}inactive_file 3000\n{prefix}active_file 500\n"
        )
        assert memory.available() == pytest.approx(host, rel=0.5)
        (group / limit_file).write_text(f"{2**63 - 4096}\n")
        assert memory.available() == pytest.approx(host, rel=0.5)
        (group / limit_file).write_text("10000\n")
        assert memory.available() == 4500


def test_check(device):
    device(bytes_limit=4 * 2**30, bytes_in_use=2**31)
    memory.check(2**31, "the caches")
    with pytest.raises(UserError, match=r"the caches would take 2.0 GiB and only 2.0 GiB is free"):
        memory.check(2**31 + 1, "the caches")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (3.2 * 2**30, "3.2 GiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_show(count, shown):
    assert memory.show(count) == shown
