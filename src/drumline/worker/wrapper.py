"""How a worker object is made, started, called and ended; the same in a worker process and in the engine core (uni)."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from drumline.config import ParallelConfig, ProcessConfig
from drumline.errors import ConfigError
from drumline.parallel.layout import worker_places
from drumline.parallel.rendezvous import collective_backend
from drumline.plan.memory import StepCosts
from drumline.platforms import resolve_platform
from drumline.processes.titles import worker_name
from drumline.worker.protocol import WorkerContext

log = logging.getLogger(__name__)

DEFAULT_WORKER = "drumline.model.worker:ModelWorker"
"""What ``worker_cls="auto"`` means."""
SHARED_SHOWN = 5
"""Most names that a message about shared attributes has."""


def import_name(name: str) -> Any:
    """The object that a dotted name (``package.module:Name`` or ``package.module.Name``) stands for.

    ImportError or AttributeError if there is none.
    """
    module, colon, path = name.partition(":")
    if not colon:
        module, _, path = name.rpartition(".")
    if not module or not path:
        raise ImportError(f"{name!r} is no dotted name such as package.module:Name")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def name_of(parallel: ParallelConfig, rank: int) -> str:
    """Title and log prefix of a worker whose groups exist: ``Worker_PP0_TP3``."""
    return worker_name(**worker_places(parallel, rank), expert_parallel=parallel.enable_expert_parallel)


def worker_class_name(process: ProcessConfig) -> str:
    """Dotted name of the worker class that is asked for."""
    return DEFAULT_WORKER if process.worker_cls == "auto" else process.worker_cls


def load_worker_class(process: ProcessConfig) -> type:
    """The worker class with its extension mixed in. ConfigError if a name is wrong or the two share an attribute."""
    worker = _import_class(worker_class_name(process), "--worker-cls")
    extension = _load_extension(process)
    return worker if extension is None else mix(worker, extension)


def _load_extension(process: ProcessConfig) -> type | None:
    name = process.worker_extension_cls
    return _import_class(name, "--worker-extension-cls") if name else None


def _import_class(name: str, option: str) -> type:
    try:
        found = import_name(name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"{option} {name}: cannot be imported: {exc}") from exc
    if not isinstance(found, type):
        raise ConfigError(f"{option} {name}: must be a class. Got {found!r}")
    return found


def mix(worker: type, extension: type) -> type:
    """A subclass of both. ConfigError if they share an attribute: neither may silently hide the other's.

    Special methods count where both define them; an ``__init__`` of the extension would never run. What the worker
    sets on itself when it is made is looked at by :func:`refuse_hidden`.
    """
    if issubclass(extension, worker):
        raise ConfigError(
            f"worker extension {extension.__name__} is a subclass of the worker class {worker.__name__}: give it as "
            "--worker-cls, or leave the base out"
        )
    shared = [name for name in _names(extension) if hasattr(worker, name)]
    _refuse_shared(shared, worker, extension)
    own, brought = _special(worker), _special(extension)
    if special := sorted(name for name, it in brought.items() if own.get(name, it) is not it):
        raise ConfigError(
            f"worker extension {extension.__name__} has {', '.join(special)}, which the worker class {worker.__name__} "
            "has too and which would never run: move what it does into methods that you call "
            "(--worker-extension-cls)"
        )
    try:
        return type(worker.__name__, (worker, extension), {"__module__": worker.__module__, "__doc__": worker.__doc__})
    except TypeError as error:
        raise ConfigError(
            f"worker extension {extension.__name__} and worker class {worker.__name__} cannot be one class: {error} "
            "(--worker-extension-cls)"
        ) from error


def refuse_hidden(worker: Any, extension: type) -> None:
    """ConfigError if the worker object has set an attribute on itself that hides one of its extension's."""
    own = getattr(worker, "__dict__", {})
    _refuse_shared([name for name in _names(extension) if name in own], type(worker), extension)


def _refuse_shared(names: list[str], worker: type, extension: type) -> None:
    if not names:
        return
    more = f" and {len(names) - SHARED_SHOWN} more" if len(names) > SHARED_SHOWN else ""
    raise ConfigError(
        f"worker extension {extension.__name__} and worker class {worker.__name__} share "
        f"{', '.join(names[:SHARED_SHOWN])}{more}: rename them in the extension (--worker-extension-cls)"
    )


def _names(extension: type) -> list[str]:
    """What an extension brings, special names aside."""
    return sorted(name for name in dir(extension) if not _is_special(name))


def _special(cls: type) -> dict[str, Any]:
    """Special methods that a class has from anybody but ``object``."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= {name: it for name, it in vars(base).items() if _is_special(name) and inspect.isroutine(it)}
    return {name: it for name, it in found.items() if not name.startswith("__annotate")}


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def start_worker(
    context: WorkerContext,
    *,
    device: str,
    made: Callable[[Any], None] = lambda worker: None,
    joined: Callable[[], None] = lambda: None,
) -> Any:
    """Construct the worker and call ``init_device`` and ``load_model``, each where it exists.

    Args:
        context: what the worker is told.
        device: which physical device it has, for the log.
        made: called with the worker as soon as there is one, so that it can be shut down if the rest fails.
        joined: called after ``init_device``: the groups exist.

    """
    context.set_phase("import worker class")
    process = context.config.process
    cls, extension = load_worker_class(process), _load_extension(process)
    context.set_phase("construct")
    worker = cls(context)
    made(worker)
    if extension is not None:
        refuse_hidden(worker, extension)
    context.set_phase("init_device")
    _log_place(context, device)
    _call_if_there(worker, "init_device")
    joined()
    context.set_phase("load_model")
    _call_if_there(worker, "load_model")
    if extension is not None:
        refuse_hidden(worker, extension)
    return worker


def _log_place(context: WorkerContext, device: str) -> None:
    """Once for each worker: where it is, how it meets the others, and on what."""
    method = context.distributed_init_method
    platform = resolve_platform(context.config.platform)
    log.info(
        "world_size=%d rank=%d local_rank=%d distributed_init_method=%s backend=%s device=%s",
        context.config.parallel.world_size,
        context.rank,
        context.local_rank,
        method or "none",
        collective_backend(platform.collective_backend, method) if method else "none",
        device,
    )


def stop_worker(worker: Any) -> None:
    """Call ``shutdown`` where it exists."""
    _call_if_there(worker, "shutdown")


def init_output_thread(worker: Any) -> None:
    """Call ``init_output_thread`` where it exists, in the thread that finishes outputs: it sets the device there."""
    _call_if_there(worker, "init_output_thread")


def idle_work(worker: Any) -> Callable[[], bool]:
    """The worker's ``while_idle``; without one there is never anything to do."""
    return getattr(worker, "while_idle", None) or (lambda: False)


def busy_ns(worker: Any) -> Callable[[], int] | None:
    """The worker's ``busy_ns``; None: it does not say."""
    found: Callable[[], int] | None = getattr(worker, "busy_ns", None)
    return found


def check_health(worker: Any) -> None:
    """Call ``check_health`` where it exists: a worker that answers at all is healthy without it."""
    _call_if_there(worker, "check_health")


def step_costs(worker: Any) -> StepCosts | None:
    """The worker's ``step_costs``; None where it has none: then it is asked for no memory either."""
    found: Callable[[], StepCosts] | None = getattr(worker, "step_costs", None)
    return None if found is None else found()


def _call_if_there(worker: Any, method: str) -> None:
    found = getattr(worker, method, None)
    if found is not None:
        found()


def bind(worker: Any, method: str | Callable[..., Any]) -> Callable[..., Any]:
    """What to call for ``method``: the worker's method of that name, or the function with the worker first."""
    if not isinstance(method, str):
        return partial(method, worker)
    found = getattr(worker, method, None)
    if found is None:
        raise AttributeError(f"worker class {type(worker).__name__} has no method {method!r}")
    return found  # type: ignore[no-any-return]


def step_of(method: str, args: tuple[Any, ...]) -> int | None:
    """Step that a call belongs to, for reports: of its plan, or the first argument of ``sample_tokens``."""
    if not args:
        return None
    step = args[0] if method == "sample_tokens" else getattr(args[0], "step", None)
    return step if isinstance(step, int) else None
