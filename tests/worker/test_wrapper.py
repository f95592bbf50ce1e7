"""How a worker object is found, mixed, started and called."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from drumline.config import EngineConfig, ParallelConfig, ProcessConfig
from drumline.errors import ConfigError
from drumline.plan.step import StepPlan
from drumline.worker.protocol import WorkerContext
from drumline.worker.wrapper import (
    DEFAULT_WORKER,
    bind,
    check_health,
    import_name,
    load_worker_class,
    mix,
    name_of,
    start_worker,
    step_of,
    stop_worker,
    worker_class_name,
)


class Base:
    """A worker."""

    count = 0

    def work(self) -> str:
        return "work"


class More:
    """An extension that shares nothing."""

    def more(self) -> str:
        return f"more {self.count}"  # type: ignore[attr-defined]


class Clash:
    """An extension that shares an attribute that is no method."""

    count = 1

    def __repr__(self) -> str:
        return "dunders may be shared"


def context(worker: str = f"{__name__}:Traced", **parallel: Any) -> WorkerContext:
    config = EngineConfig(platform="cpu", parallel=ParallelConfig(**parallel), process=ProcessConfig(worker_cls=worker))
    return WorkerContext(config=config, rank=0, local_rank=0, distributed_init_method="", is_driver=True)


class Traced:
    """Fails in load_model."""

    def __init__(self, context: WorkerContext) -> None:
        self.trace: list[str] = []

    def init_device(self) -> None:
        self.trace.append("init_device")

    def load_model(self) -> None:
        raise ValueError("no weights")

    def shutdown(self) -> None:
        self.trace.append("shutdown")


@pytest.mark.parametrize("name", ["json.decoder.JSONDecoder", "json.decoder:JSONDecoder", "json:decoder.JSONDecoder"])
def test_dotted_names(name: str) -> None:
    import json

    assert import_name(name) is json.JSONDecoder


@pytest.mark.parametrize("name", ["", "json", "json:", ":x", "no_such_module.x", "json.nothing"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises((ImportError, AttributeError)):
        import_name(name)


def test_the_default_is_the_model_worker() -> None:
    assert worker_class_name(ProcessConfig()) == DEFAULT_WORKER == "drumline.model.worker:ModelWorker"


def test_mixing() -> None:
    mixed = mix(Base, More)
    worker = mixed()
    assert (worker.work(), worker.more()) == ("work", "more 0")
    assert isinstance(worker, Base)
    assert mixed.__name__ == "Base"


def test_mixing_refuses_shared_attributes() -> None:
    with pytest.raises(ConfigError, match=r"worker extension Clash and worker class Base share count: rename"):
        mix(Base, Clash)
    mix(More, type("OnlyDunders", (), {"__repr__": Clash.__repr__}))


def test_mixing_refuses_what_would_never_run() -> None:
    init = type("Init", (), {"__init__": lambda self: None})
    with pytest.raises(ConfigError, match=r"worker extension Init has __init__, which the worker class Traced has too"):
        mix(Traced, init)
    assert mix(Base, init)().work() == "work"  # that worker class has none: the extension's runs
    with pytest.raises(ConfigError, match=r"worker extension Sub is a subclass of the worker class Base"):
        mix(Base, type("Sub", (Base,), {}))
    many = {f"a{i}": i for i in range(7)}
    with pytest.raises(ConfigError, match=r"share a0, a1, a2, a3, a4 and 2 more: rename"):
        mix(type("Wide", (), many), type("Wider", (), many))
    with pytest.raises(ConfigError, match=r"cannot be one class: .*lay-?out"):
        mix(type("One", (), {"__slots__": ("x",)}), type("Other", (), {"__slots__": ("y",)}))


def test_special_methods_of_a_common_base_are_no_collision() -> None:
    shared = type("Shared", (), {"__len__": lambda self: 3})
    worker, extension = type("W", (shared,), {}), type("E", (shared,), {"more": lambda self: len(self)})
    assert mix(worker, extension)().more() == 3


class Hides:
    """An extension whose names the worker sets on itself: when it is made, or later."""

    def late(self) -> str:
        return "of the extension"


@pytest.mark.parametrize("method", ["__init__", "load_model"])
def test_an_attribute_of_the_object_that_hides_the_extension(method: str) -> None:
    def assign(self: Any, *_: Any) -> None:
        self.late = 1

    class Assigning(Traced):
        """Loads nothing."""

        def load_model(self) -> None: ...

    setattr(Assigning, method, assign)
    globals()["Assigning"] = Assigning
    try:
        config = context(f"{__name__}:Assigning").config
        process = ProcessConfig(worker_cls=f"{__name__}:Assigning", worker_extension_cls=f"{__name__}:Hides")
        told = context()
        told.config = config.with_(process=process)
        with pytest.raises(ConfigError, match="worker extension Hides and worker class Assigning share late: rename"):
            start_worker(told, device="cpu")
    finally:
        del globals()["Assigning"]


def test_a_worker_class_must_be_a_class() -> None:
    with pytest.raises(ConfigError, match="must be a class"):
        load_worker_class(ProcessConfig(worker_cls="json.dumps"))


def test_start_log_and_failure(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="no weights"):
        start_worker(context(), device="cpu", made=made.append)
    stop_worker(made[0])
    assert made[0].trace == ["init_device", "shutdown"]
    assert "world_size=1 rank=0 local_rank=0 distributed_init_method=none backend=none device=cpu" in caplog.text


def test_calls() -> None:
    worker = Base()
    assert bind(worker, "work")() == "work"
    assert bind(worker, lambda w, x: (w is worker, x))(3) == (True, 3)
    with pytest.raises(AttributeError, match="worker class Base has no method 'nothing'"):
        bind(worker, "nothing")
    check_health(worker)
    stop_worker(worker)


def test_step_of() -> None:
    assert step_of("execute_model", ()) is None
    assert step_of("execute_model", (StepPlan(step=4),)) == 4
    assert step_of("sample_tokens", (5, None)) == 5
    assert step_of("echo", (5,)) is None


def test_names() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [name_of(parallel, rank) for rank in range(4)] == [
        "Worker_PP0_TP0",
        "Worker_PP0_TP1",
        "Worker_PP1_TP0",
        "Worker_PP1_TP1",
    ]
    assert name_of(ParallelConfig(), 0) == "Worker"
