"""Made-up worker classes without torch, used with uni and mp."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from drumline.worker.protocol import WorkerContext


class OddError(Exception):
    """Its constructor needs three arguments, and it cannot be pickled."""

    def __init__(self, one: int, two: int, three: int) -> None:
        super().__init__(f"{one} {two} {three}")
        self.lock = threading.Lock()


class Payload:
    """An argument that can be watched."""

    def __init__(self, size: int = 0) -> None:
        self.data = b"x" * size


class Plain:
    """Answers with what it was told."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.rank = context.rank
        self.seen: list[Any] = []
        self.life = ["construct"]
        self.watched: list[weakref.ref[Payload]] = []

    def init_device(self) -> None:
        self.life.append("init_device")

    def load_model(self) -> None:
        self.context.set_phase("load_model 50%")
        self.life.append("load_model")

    def check_health(self) -> None:
        self.life.append("check_health")

    def shutdown(self) -> None:
        path = os.environ.get("DRUMLINE_TEST_SHUTDOWN")
        if path:
            with open(f"{path}-{self.rank}", "a") as file:
                file.write("shutdown\n")
            if os.environ.get("DRUMLINE_TEST_SLOW_SHUTDOWN"):
                time.sleep(0.3)
                with open(f"{path}-{self.rank}", "a") as file:
                    file.write("whole\n")

    def get_life(self) -> list[str]:
        return self.life

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.rank, args, kwargs

    def note(self, value: Any) -> int:
        self.seen.append(value)
        return self.rank

    def get_seen(self) -> list[Any]:
        return self.seen

    def place(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "local_rank": self.context.local_rank,
            "driver": self.context.is_driver,
            "init": self.context.distributed_init_method,
            "torch": "torch" in sys.modules,
        }

    def raise_on(self, rank: int, text: str = "boom", before_s: float = 0.0) -> int:
        if self.rank == rank:
            time.sleep(before_s)
            raise ValueError(f"{text} rank{rank}")
        return self.rank

    def raise_odd(self, rank: int) -> int:
        if self.rank == rank:
            raise OddError(1, 2, 3)
        return self.rank

    def raise_while_others_block(self, rank: int, seconds: float, after: float = 0.0) -> None:
        if self.rank == rank:
            time.sleep(after)
            raise ValueError(f"boom rank{rank}")
        time.sleep(seconds)

    def sleep(self, seconds: float, rank: int | None = None) -> int:
        if rank is None or rank == self.rank:
            time.sleep(seconds)
        return self.rank

    def leave(self, rank: int, how: str) -> int:
        if self.rank == rank:
            if how == "exit":
                os._exit(3)
            if how == "sysexit":
                raise SystemExit(4)
            if how == "sysexit text":
                raise SystemExit("no more of this")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "segfault":
                ctypes.string_at(0)
        time.sleep(30)
        return self.rank

    def unpicklable(self) -> Any:
        return threading.Lock()

    def big(self, size: int) -> bytes:
        return b"x" * size

    def watch(self, payload: Payload) -> None:
        self.watched.append(weakref.ref(payload))

    def alive_payloads(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.watched)

    def execute_model(self, plan: Any) -> Any:
        return plan.step

    def sample_tokens(self, step: int, grammar: Any) -> Any:
        return step, grammar


class FailsToStart(Plain):
    """Raises, dies or hangs where the environment says, on the last rank."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._fail("construct")

    def init_device(self) -> None:
        self._fail("init_device")

    def load_model(self) -> None:
        self._fail("load_model")

    def _fail(self, where: str) -> None:
        place, _, how = os.environ["DRUMLINE_TEST_FAIL"].partition(":")
        if place != where or self.rank != self.context.config.parallel.world_size - 1:
            return
        if how == "raise":
            raise ValueError(f"no {where}")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


class Bare:
    """Has nothing but one method: the executor asks for no interface."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank

    def hello(self) -> str:
        return f"hello {self.rank}"


class Meets:
    """No rank gets through its start before all have come to it."""

    def __init__(self, context: WorkerContext) -> None:
        self.ranks = context.config.parallel.world_size
        self.folder = Path(context.config.process.log_dir or tempfile.gettempdir()) / f"meet-{os.getppid()}"
        self.folder.mkdir(exist_ok=True)
        (self.folder / str(context.rank)).touch()

    def init_device(self) -> None:
        deadline = time.monotonic() + 30
        while len(list(self.folder.iterdir())) < self.ranks:
            if time.monotonic() > deadline:
                raise TimeoutError("the other ranks have not come")
            time.sleep(0.01)

    def hello(self) -> int:
        return len(list(self.folder.iterdir()))


class Extension:
    """Mixed into a worker class."""

    def extra(self, value: int) -> int:
        return value + self.rank  # type: ignore[attr-defined,no-any-return]


class Busy(Plain):
    """Has something to do while no call waits."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.left = 0.0
        self.done = 0

    def give_work(self, times: float) -> None:
        self.left, self.done = times, 0

    def while_idle(self) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        self.done += 1
        return True

    def get_done(self) -> int:
        return self.done


class Ring:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


class Littering(Plain):
    """Every call leaves cycles; notes where Python looks for them."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.inside = False
        self.looks: list[bool] = []
        self.rings: list[weakref.ref[Ring]] = []
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.looks.append(self.inside)

    def compile_or_warm_up_model(self) -> None:
        self.life.append("warm-up")

    def litter(self, count: int) -> None:
        self.inside = True
        self.rings += [weakref.ref(Ring()) for _ in range(count)]
        self.inside = False

    def found(self) -> tuple[int, list[bool], int]:
        """Cycles that are left, whether each look was inside a call, frozen objects."""
        return sum(ring() is not None for ring in self.rings), self.looks, gc.get_freeze_count()

    def forget_looks(self) -> None:
        self.looks.clear()


class Threads(Plain):
    """Notes in each phase how many threads torch would compute with, and what the environment says."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.noted: dict[str, tuple[int, str | None]] = {}
        self._note("construct")

    def _note(self, phase: str) -> None:
        import torch

        self.noted[phase] = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    def init_device(self) -> None:
        self._note("init_device")

    def load_model(self) -> None:
        self._note("load_model")

    def compile_or_warm_up_model(self) -> None:
        self._note("warm-up")

    def execute_model(self, plan: Any) -> dict[str, tuple[int, str | None]]:
        import torch

        self._note("step")
        torch.ones(600, 600) @ torch.ones(600, 600)
        return self.noted


class Counting(Plain):
    """Says that each call took it 5 ns, and 1000 ns times its rank before."""

    calls = 0

    def busy_ns(self) -> int:
        self.calls += 1
        return 1000 * self.rank + 5 * self.calls


class Clashing:
    """Shares two attributes with Plain."""

    def echo(self) -> None: ...

    def get_seen(self) -> None: ...


class Hidden:
    """Has the name of an attribute that Plain sets on itself, which its class does not show."""

    def seen(self) -> None: ...


class Slow(Plain):
    """Takes a while to stop."""

    def shutdown(self) -> None:
        time.sleep(0.3)
        super().shutdown()


class Gloo(Plain):
    """Joins groups: shared memory on one machine, gloo where the init method offers none."""

    def init_device(self) -> None:
        from drumline.parallel.groups import init_groups
        from drumline.parallel.layout import Layout

        parallel = self.context.config.parallel
        self.groups = init_groups(
            Layout.of(parallel), self.rank, self.context.distributed_init_method, "gloo", parallel.distributed_timeout_s
        )

    def total(self) -> float:
        import torch

        return float(self.groups.tp.all_reduce(torch.tensor([float(self.rank + 1)])).item())

    def step(self, rank: int) -> float:
        if self.rank == rank:
            raise ValueError(f"boom rank{rank}")
        return self.total()

    def shutdown(self) -> None:
        self.groups.close()
        super().shutdown()


class Output:
    """An output that is not finished yet."""

    def __init__(self, value: Any, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self.value, self.delay_s, self.error = value, delay_s, error

    def get_output(self) -> Any:
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return self.value() if callable(self.value) else self.value


class Deferred(Plain):
    """Its methods return before their outputs are finished."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.prepared: list[str] = []
        self.finished: list[Any] = []

    def init_output_thread(self) -> None:
        self.prepared.append(threading.current_thread().name)
        if os.environ.get("DRUMLINE_TEST_FAIL") == "init_output_thread":
            raise ValueError("no device")

    def later(self, value: Any, delay_s: float = 0.0) -> Output:
        self.seen.append((value, time.monotonic()))

        def finish() -> Any:
            self.finished.append((value, threading.current_thread().name, time.monotonic()))
            return self.rank, value

        return Output(finish, delay_s)

    def fail_later(self, delay_s: float = 0.0) -> Output:
        return Output(None, delay_s, OddError(1, 2, 3))

    def unpicklable_later(self) -> Output:
        return Output(threading.Lock())

    def leave_later(self) -> Output:
        return Output(lambda: sys.exit(3))

    def get_finished(self) -> list[Any]:
        return self.finished

    def get_prepared(self) -> list[str]:
        return self.prepared
