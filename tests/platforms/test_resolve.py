"""Which platform is meant, with made-up ones installed as a real distribution on sys.path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.errors import ConfigError
from drumline.platforms import CudaPlatform, device_table, resolve_platform

MODULE = """
from drumline.config import Device, DeviceTable
from drumline.platforms import DeviceMemory, Platform

class Abacus(Platform):
    name = "abacus"
    device_type = "cpu"
    ray_resource = "BEAD"
    needs_tcp_store = True
    starts_concurrently = False
    here = True

    def is_available(self):
        return self.here

    def device_table(self):
        beads = tuple(Device(index=i, name="bead", uuid=f"BEAD-{i}", memory=64) for i in range(3))
        return DeviceTable(platform=self.name, accelerator=True, devices=beads, memory=1, cores=1)

    def device_initialised(self):
        return False

    def set_device(self, index):
        import torch
        return torch.device("cpu")

    def memory(self, index):
        return DeviceMemory(32, 64)

    def synchronize(self):
        pass

    def empty_cache(self):
        pass

class Away(Abacus):
    name = "away"
    here = False

class Second(Abacus):
    name = "second"

def not_a_platform():
    return 42
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a distribution with the given entry points (lines ``name = value``) on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_up_abacus", raising=False)
    (tmp_path / "made_up_abacus.py").write_text(MODULE)
    info = tmp_path / "made_up_abacus-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-abacus\nVersion: 1.0\n")

    def write(points: str) -> None:
        (info / "entry_points.txt").write_text(f"[drumline.platforms]\n{points}\n")

    return write


def test_an_installed_platform_by_name(install: Callable[[str], None]) -> None:
    install("abacus = made_up_abacus:Abacus")
    platform = resolve_platform("abacus")
    assert (platform.name, platform.ray_resource, platform.needs_tcp_store) == ("abacus", "BEAD", True)
    assert [device.uuid for device in device_table("abacus").devices] == ["BEAD-0", "BEAD-1", "BEAD-2"]
    assert platform.memory(0).free == 32
    assert not platform.peer_access(0, 1)


def test_auto_prefers_an_installed_platform_that_is_available(install: Callable[[str], None]) -> None:
    install("abacus = made_up_abacus:Abacus\naway = made_up_abacus:Away")
    assert resolve_platform().name == "abacus"


def test_auto_passes_over_one_that_is_not_available_or_broken(
    install: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    install("away = made_up_abacus:Away\nbroken = made_up_abacus:Nothing")
    assert resolve_platform().name in ("cpu", "cuda")
    assert "platform broken is installed but cannot be used" in caplog.text


def test_several_that_are_available_are_a_question(install: Callable[[str], None]) -> None:
    install("abacus = made_up_abacus:Abacus\nsecond = made_up_abacus:Second")
    with pytest.raises(ConfigError, match=r"\(abacus, second\): choose one by its name"):
        resolve_platform()


def test_names_that_cannot_be_used(install: Callable[[str], None]) -> None:
    install("other = made_up_abacus:not_a_platform\nbroken = made_up_abacus:Nothing")
    with pytest.raises(ConfigError, match=r"is no drumline.platforms.Platform: 42"):
        resolve_platform("other")
    with pytest.raises(ConfigError, match=r"'broken' .* cannot be loaded"):
        resolve_platform("broken")
    with pytest.raises(ConfigError, match="one of auto, cpu, cuda, broken, other, not 'tpu'"):
        resolve_platform("tpu")


def test_cpu() -> None:
    platform = resolve_platform("cpu")
    table = platform.device_table()
    assert not table.accelerator
    assert table.devices == ()
    assert table.cores >= 1
    assert 0 < platform.memory(0).free <= platform.memory(0).total == table.memory
    assert not platform.device_initialised()
    assert platform.worker_environment({}) == {}
    platform.synchronize()
    platform.empty_cache()


def test_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.platforms.host.cores", lambda: 8)
    threads = resolve_platform("cpu").threads_per_worker
    assert threads(3, 2, {"OMP_NUM_THREADS": "5"}) == 3
    assert threads(0, 2, {"OMP_NUM_THREADS": "5,2"}) == 5
    assert threads(0, 2, {"OMP_NUM_THREADS": " "}) == 4
    assert threads(0, 2, {"OMP_NUM_THREADS": "100000"}) == threads(100000, 2, {}) == 8
    for text in ("many", "0", "-1", "²", ",2"):
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS must be"):
            threads(0, 2, {"OMP_NUM_THREADS": text})
    assert threads(0, 3, {}) == 2
    assert threads(0, 99, {}) == 1


def test_cuda_by_name_even_without_a_device() -> None:
    assert isinstance(resolve_platform("cuda"), CudaPlatform)


def test_counting_devices_imports_no_torch() -> None:
    script = "import sys; from drumline.platforms import device_table; device_table()\n"
    script += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
