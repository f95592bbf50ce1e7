"""Which class a configuration means, and what is refused before anything is started."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.config import Device, DeviceTable, EngineConfig, ParallelConfig, SchedulerConfig
from drumline.errors import ConfigError
from drumline.executor import Executor
from drumline.executor.mp import MultiprocExecutor
from drumline.executor.uni import UniExecutor
from tests.executor.conftest import Make, configure


class Recording(UniExecutor):
    """A custom executor: remembers what was called."""

    uses_ray = False

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("calls", []).append(method)
        return super().collective_rpc(method, *args, **kwargs)


class NoExecutor:
    """Imports, and is none."""


def machine(count: int = 0, platform: str = "cuda") -> DeviceTable:
    devices = tuple(Device(index=i, name="H200") for i in range(count))
    return DeviceTable(platform=platform, accelerator=platform != "cpu", devices=devices)


CPU = machine(platform="cpu")


def select(devices: DeviceTable = CPU, **parallel: Any) -> type[Executor]:
    return Executor.get_class(EngineConfig(parallel=ParallelConfig(**parallel)), devices)


def test_none_given() -> None:
    assert select() is UniExecutor
    assert select(tensor_parallel_size=2) is MultiprocExecutor
    assert select(data_parallel_size=2) is MultiprocExecutor
    assert select(machine(2), tensor_parallel_size=2) is MultiprocExecutor
    assert select(machine(1), tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1") is MultiprocExecutor


def test_this_machine_by_default() -> None:
    assert Executor.get_class(configure(None, 1)) is UniExecutor
    assert Executor.get_class(configure(None, 2)) is MultiprocExecutor


def test_too_few_devices() -> None:
    for backend in (None, "mp"):
        with pytest.raises(ValueError, match="world size 4") as caught:
            select(machine(3), tensor_parallel_size=4, distributed_executor_backend=backend)
        for part in ("3", "--nnodes", "ray"):
            assert part in str(caught.value)
    with pytest.raises(ConfigError, match="world size 4"):
        MultiprocExecutor(configure("mp", 4), devices=machine(3))


def test_inside_a_ray_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group: list[object] = [object()]
    ray = SimpleNamespace(
        is_initialized=lambda: True, util=SimpleNamespace(get_current_placement_group=lambda: group[0])
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConfigError, match="the ray backend is not built yet"):
        select(tensor_parallel_size=2)
    assert select() is UniExecutor
    group[0] = None  # type: ignore[call-overload]
    assert select(tensor_parallel_size=2) is MultiprocExecutor


@pytest.mark.parametrize("name", ["ray", "external_launcher"])
def test_not_built_yet(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the {name} backend is not built yet: use mp"):
        select(distributed_executor_backend=name)


def test_several_machines_are_not_built_yet() -> None:
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1"))
    with pytest.raises(ConfigError, match="not built yet"):
        MultiprocExecutor(config, devices=CPU)


def test_uni_runs_one_worker() -> None:
    with pytest.raises(ConfigError, match="uni runs one worker, the world size is 2: use mp"):
        UniExecutor(configure("uni", 2))


@pytest.mark.parametrize("given", [Recording, "tests.executor.test_select.Recording", f"{__name__}:Recording"])
def test_a_class_or_its_dotted_name(make: Make, given: Any) -> None:
    executor = make(given, world_size=1)
    assert type(executor).__name__ == "Recording"
    assert executor.collective_rpc("echo", (1,)) == [(0, (1,), {})]
    executor.check_health()
    assert executor.calls[0] == "echo"  # type: ignore[attr-defined]
    assert len(executor.calls) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [NoExecutor, "tests.executor.test_select.NoExecutor", "json.dumps", 7])
def test_no_subclass(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^distributed_executor_backend must be a subclass of Executor\. Got .+"):
        select(distributed_executor_backend=given)


@pytest.mark.parametrize("given", ["mpi", "no.such.module", "tests.executor.test_select.Missing", "a:"])
def test_an_unknown_string(given: str) -> None:
    with pytest.raises(ValueError, match="must be one of uni, mp, ray, external_launcher, a subclass of Executor"):
        select(distributed_executor_backend=given)


def test_pipeline_stages_need_a_class_that_can() -> None:
    config = EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match="--pipeline-parallel-size"):
        UniExecutor(config, devices=CPU)


def test_look_ahead_depends_on_the_class(make: Make) -> None:
    class Plainly(Recording):
        supports_async_scheduling = False

    assert make(Plainly, world_size=1).max_concurrent_batches == 1
    asked = replace(configure(Plainly, 1), scheduler=SchedulerConfig(async_scheduling=True))
    with pytest.raises(ConfigError, match=r"Plainly: it does not declare supports_.*--async-scheduling"):
        Plainly(asked)


@pytest.mark.parametrize(("look_ahead", "batches"), [(None, 2), (True, 2), (False, 1)])
def test_how_many_plans_may_be_in_flight(look_ahead: bool | None, batches: int) -> None:
    config = replace(configure("uni", 1), scheduler=SchedulerConfig(async_scheduling=look_ahead))
    with UniExecutor(config) as executor:
        assert executor.max_concurrent_batches == batches


def test_a_subclass_of_mp_whose_class_workers_cannot_import(make: Make) -> None:
    class Local(MultiprocExecutor):
        pass

    assert make(Local, world_size=2).collective_rpc("note", (1,)) == [0, 1]


def test_extensions(make: Make) -> None:
    for backend in ("uni", "mp"):
        executor = make(backend, extension="Extension")
        assert executor.collective_rpc("extra", (10,)) == [10 + r for r in range(executor.world_size)]
        assert executor.collective_rpc("note", (1,), reply_rank=0) == 0


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_an_extension_that_shares_attributes(make: Make, backend: str) -> None:
    with pytest.raises(Exception, match="share echo, get_seen"):
        make(backend, extension="Clashing")
    with pytest.raises(Exception, match="worker extension Hidden and worker class Plain share seen: rename"):
        make(backend, extension="Hidden")


def test_how_busy_workers_are(make: Make) -> None:
    """Without a call: read from what they write after each one."""
    executor = make(worker="Counting")
    executor.collective_rpc("note", (1,))
    before = executor.busy_ns()
    assert [ns // 1000 for ns in before] == [0, 1, 2]
    executor.collective_rpc("note", (2,))
    assert executor.busy_ns() == [ns + 5 for ns in before]
    assert make("uni", worker="Counting").busy_ns() == []


def test_a_worker_class_with_one_method(make: Make) -> None:
    executor = make(worker="Bare")
    executor.check_health()
    assert executor.collective_rpc("hello") == ["hello 0", "hello 1", "hello 2"]


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_worker_class_that_does_not_exist(make: Make, backend: str) -> None:
    with pytest.raises(Exception, match=r"--worker-cls .*Nobody: cannot be imported"):
        make(backend, worker="Nobody")
