"""The cuda platform on made-up machines; what it finds on a real one is tried where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from drumline.config import EngineConfig, ParallelConfig
from drumline.errors import ConfigError
from drumline.platforms import cuda
from drumline.platforms.cuda import (
    CudaPlatform,
    Gpu,
    _nvml_peers,
    bus_address,
    bytes_of,
    find_gpus,
    parse_smi,
    visible,
)

A = Gpu(uuid="GPU-aaaa1111-1", name="H200", memory=141 << 30, bus="0000:1b:00.0")
B = Gpu(uuid="GPU-aaaa2222-2", name="H200", memory=141 << 30, bus="0000:43:00.0")
M = tuple(Gpu(uuid=f"MIG-cccc{i}", name="H200 MIG 3g.71gb", memory=70 << 30, bus="0000:52:00.0") for i in range(2))
C = Gpu(uuid="GPU-cccc", name="H200", memory=141 << 30, bus="0000:52:00.0", instances=M)
ALL = (A, B, C)


@pytest.mark.parametrize(
    ("tokens", "seen"),
    [
        (None, (A, B, M[0])),
        ("0,1", (A, B)),
        ("1,0", (B, A)),
        (" 1 , 0 ", (B, A)),
        ("2", (M[0],)),
        ("GPU-aaaa2222-2", (B,)),
        ("GPU-aaaa2", (B,)),
        ("MIG-cccc1,GPU-aaaa1111-1", (M[1], A)),
        ("MIG-cccc1,MIG-cccc0", (M[1], M[0])),
        ("GPU-cccc", (M[0],)),
        ("", ()),
        ("-1", ()),
        ("1,-1,0", (B,)),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_in_the_order_of_the_tokens(tokens: str | None, seen: tuple[Gpu, ...]) -> None:
    assert visible(ALL, tokens) == seen


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("0,0", "names the device GPU-aaaa1111-1 twice"),
        ("0,GPU-aaaa1111-1", "twice"),
        ("2,MIG-cccc0", "twice"),
        ("3", "names device 3, but this machine has 3"),
        ("GPU-aaaa", "GPU-aaaa1111-1, GPU-aaaa2222-2"),
        ("GPU-ffff", "no device of this machine"),
        ("first", "give an index or a whole UUID"),
    ],
)
def test_tokens_that_cannot_be_right_are_refused(tokens: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        visible(ALL, tokens)


def test_device_table() -> None:
    table = CudaPlatform(lambda: ALL, {"CUDA_VISIBLE_DEVICES": "1,0"}).device_table()
    assert [(device.index, device.uuid, device.memory) for device in table.devices] == [
        (0, B.uuid, B.memory),
        (1, A.uuid, A.memory),
    ]
    assert table.accelerator
    assert table.platform == "cuda"
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match="has 2"):
        config.checked(table)


def test_availability_wants_a_device_and_a_torch_that_can_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "torch_is_cpu_build", lambda: False)
    assert CudaPlatform(lambda: ALL, {}).is_available()
    assert not CudaPlatform(lambda: (), {}).is_available()
    assert not CudaPlatform(lambda: ALL, {"CUDA_VISIBLE_DEVICES": ""}).is_available()
    monkeypatch.setattr(cuda, "torch_is_cpu_build", lambda: True)
    assert not CudaPlatform(lambda: ALL, {}).is_available()


SMI = """\
GPU-1, NVIDIA H200, 143771, 00000000:1B:00.0, 143000
GPU-2, NVIDIA H200, [N/A], 00000001:52:00.0, [N/A]
"""
LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-1)
GPU 1: NVIDIA H200 (UUID: GPU-2)
  MIG 3g.71gb     Device  0: (UUID: MIG-5e)
  MIG 1g.18gb     Device  1: (UUID: MIG-6f)
"""


def test_nvidia_smi() -> None:
    first, second = parse_smi(SMI, LISTING)
    assert first == Gpu(uuid="GPU-1", name="NVIDIA H200", memory=143771 << 20, free=143000 << 20, bus="0000:1b:00.0")
    assert (second.memory, second.free) == (0, 0)
    assert second.bus == "0001:52:00.0"
    assert [(part.uuid, part.name) for part in second.instances] == [
        ("MIG-5e", "MIG 3g.71gb"),
        ("MIG-6f", "MIG 1g.18gb"),
    ]


def test_what_nvml_says_of_a_process() -> None:
    def one(pid: int, used: int | None) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, usedGpuMemory=used)

    assert bytes_of(7, [one(6, 5), one(7, 123)]) == 123
    assert bytes_of(7, [one(6, 5)]) is None  # PIDs of another namespace
    assert bytes_of(7, [one(7, None)]) is None
    assert bytes_of(7, [one(7, 1), one(7, 2)]) is None


def test_proc(tmp_path: Path) -> None:
    assert cuda._from_proc(tmp_path) is None
    for bus, uuid in (("0000:1b:00.0", "GPU-1"), ("0000:43:00.0", "GPU-2")):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
        (tmp_path / bus / "information").write_text(text)
    found = cuda._from_proc(tmp_path)
    assert found is not None
    assert [(gpu.uuid, gpu.name, gpu.bus) for gpu in found] == [
        ("GPU-1", "NVIDIA H200", "0000:1b:00.0"),
        ("GPU-2", "NVIDIA H200", "0000:43:00.0"),
    ]


def test_bus_address() -> None:
    assert bus_address("00000000:3B:00.0") == "0000:3b:00.0"


def test_environment_of_workers() -> None:
    platform = CudaPlatform(lambda: ALL, {})
    assert platform.worker_environment({}) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    assert "NCCL_NVLS_ENABLE" not in platform.worker_environment({"NCCL_NVLS_ENABLE": "1"})
    assert "NCCL_SOCKET_IFNAME" not in platform.worker_environment({"NCCL_SOCKET_IFNAME": "eth0"})
    assert "NCCL_SOCKET_IFNAME" not in platform.worker_environment({}, one_machine=False)


def test_torch_that_is_not_imported_has_opened_nothing() -> None:
    script = "import sys; from drumline.platforms.cuda import CudaPlatform as P\n"
    script += "assert not P().device_initialised() and 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


@pytest.mark.skipif(not find_gpus(), reason="no NVIDIA GPU on this machine")
def test_all_sources_agree_on_a_real_machine_and_leave_no_device_open() -> None:
    before = _open_devices()
    nvml, smi, proc = cuda._from_nvml(), cuda._from_smi(), cuda._from_proc()
    assert nvml
    assert smi
    assert [gpu.uuid for gpu in nvml] == [gpu.uuid for gpu in smi]
    assert [gpu.bus for gpu in nvml] == [gpu.bus for gpu in smi]
    if proc:
        assert {gpu.uuid for gpu in nvml} <= {gpu.uuid for gpu in proc}  # /proc shows those of other containers too
    assert _open_devices() == before


def _open_devices() -> list[str]:
    paths = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    return sorted(path for path in paths if path.startswith("/dev/nvidia"))


AS_TORCH_SEES_IT = """
import json, os, sys
from drumline.platforms.cuda import CudaPlatform
platform = CudaPlatform()
table = platform.device_table()
assert "torch" not in sys.modules
os.environ.update(platform.worker_environment(os.environ))
import torch
assert not platform.device_initialised()
ours, theirs = [], []
for device in table.devices:
    platform.set_device(device.index)
    seen = torch.cuda.get_device_properties(device.index)
    ours.append([device.uuid, device.name])
    theirs.append(["GPU-" + str(seen.uuid), seen.name])
    free, total = platform.memory(device.index)
    assert 0 < free <= total <= device.memory, (free, total, device)
assert len(theirs) == torch.cuda.device_count()
assert platform.device_initialised() or not ours
if ours:
    platform.synchronize(); platform.empty_cache()
print(json.dumps([ours, theirs]))
"""


@pytest.mark.skipif(not find_gpus(), reason="no NVIDIA GPU on this machine")
def test_the_table_is_what_torch_sees_in_a_worker() -> None:
    uuids = [gpu.uuid for gpu in find_gpus()]
    choices = [None, ",".join(reversed(uuids)), f"{uuids[0][:12]},-1", "-1"]
    for tokens in choices:
        environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        if tokens is not None:
            environ["CUDA_VISIBLE_DEVICES"] = tokens
        done = subprocess.run(
            [sys.executable, "-c", AS_TORCH_SEES_IT],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        ours, theirs = json.loads(done.stdout)
        assert ours == theirs


class Nvml:
    """Answers as the driver's library does."""

    NVMLError = RuntimeError
    NVML_P2P_CAPS_INDEX_READ = 0

    def __init__(self, states: dict[tuple[str, str], int]) -> None:
        self.states = states

    def nvmlDeviceGetP2PStatus(self, first: str, second: str, index: int) -> int:
        if (first, second) not in self.states:
            raise RuntimeError("not supported")
        return self.states[first, second]


def test_which_devices_reach_each_other() -> None:
    handles = {"A": "a", "B": "b", "C": "c"}
    states = {("a", "b"): 0, ("a", "c"): 3, ("b", "c"): 99}
    assert _nvml_peers(Nvml(states), ["A", "B", "C", "gone"], handles) == {
        "0-1": "ok",
        "0-2": "the topology does not allow it",
        "1-2": "unknown",
    }
    assert _nvml_peers(Nvml({}), ["A", "B"], handles) == {}
