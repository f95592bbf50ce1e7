"""Which start method it is: what was asked for, and where ``fork`` would break.

====================  ==========================================  ====================
method                made by                                     how
====================  ==========================================  ====================
``forkserver``        the fork server, which has the imports      forked
``plain``             the fork server, which imports nothing      executed
``spawn``             the process that has the executor           executed
``fork``              the process that has the executor           forked
====================  ==========================================  ====================

What is executed is always a module of ours, never the user's ``__main__``.

:func:`decide` is pure; :func:`probe` looks at this process and imports nothing for that.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.config import START_METHODS
from drumline.errors import ConfigError
from drumline.processes.linux import device_files

log = logging.getLogger(__name__)

VARIABLE = "DRUMLINE_WORKER_START_METHOD"
DEFAULT = "forkserver"

IN_RAY_ACTOR = "In a Ray actor and can only be spawned"
NUMA = "NUMA binding requires spawn method"
CUDA = "CUDA is initialized"
XPU = "XPU is initialized"
WSL = "WSL is detected and NVML is not compatible with fork"

_CUDA_FILES = ("/dev/nvidia-uvm", "/dev/kfd")
"""Open in a process that has a CUDA (or HIP) context, whoever made it; NVML does not open these."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a process that may fork is like."""

    in_ray_actor: bool = False
    ray_address: str = ""
    """Of the cluster (host:port of its GCS), if this is an actor."""
    numa: bool = False
    cuda: bool = False
    xpu: bool = False
    wsl: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The method that is taken."""

    method: str
    reasons: tuple[str, ...] = ()
    """Why ``fork`` was replaced."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What children need beside their environment."""

    @property
    def warning(self) -> str:
        """One line, empty if there is nothing to say."""
        if not self.reasons:
            return ""
        return f"We must use the `spawn` multiprocessing start method. Reasons: {'; '.join(self.reasons)}"


def asked_for(given: str, environ: Mapping[str, str]) -> str:
    """The method that was asked for: by configuration or flag, else by the environment, else the default.

    ConfigError if the variable holds none.
    """
    if given != "auto":
        return given
    value = environ.get(VARIABLE, "").strip()
    if value and value not in START_METHODS:
        raise ConfigError(f"{VARIABLE} must be one of {', '.join(START_METHODS)}, not {value!r}")
    return value or DEFAULT


def decide(method: str, facts: Facts) -> Decision:
    """``fork`` becomes ``spawn`` where it would break; every other method stays what it is."""
    env = {"RAY_ADDRESS": facts.ray_address} if facts.in_ray_actor and facts.ray_address else {}
    reasons = _reasons(facts) if method == "fork" else ()
    return Decision(method="spawn" if reasons else method, reasons=reasons, env=env)


def _reasons(facts: Facts) -> tuple[str, ...]:
    found = (
        (facts.in_ray_actor, IN_RAY_ACTOR),
        (facts.numa, NUMA),
        (facts.cuda, CUDA),
        (facts.xpu, XPU),
        (facts.wsl, WSL),
    )
    return tuple(reason for holds, reason in found if holds)


def probe(*, numa: bool) -> Facts:
    """Facts of this process."""
    in_actor, address = _ray()
    system = os.uname()
    return Facts(
        in_ray_actor=in_actor,
        ray_address=address,
        numa=numa,
        cuda=_initialised("cuda") or any(name.startswith(_CUDA_FILES) for name in device_files()),
        xpu=_initialised("xpu"),
        wsl="microsoft" in f"{system.release} {system.version}".lower(),
    )


def choose(given: str, *, numa: bool) -> Decision:
    """The method for workers of this process; a replacement is logged, as one warning."""
    decision = decide(asked_for(given, os.environ), probe(numa=numa))
    if decision.warning:
        log.warning("%s", decision.warning)
    return decision


def cluster_environment() -> Mapping[str, str]:
    """What children of a process that is a Ray actor need to find its cluster; else nothing."""
    return decide(DEFAULT, probe(numa=False)).env


def _initialised(kind: str) -> bool:
    """Whether torch, if it is loaded at all, has opened a device of this kind."""
    module = getattr(sys.modules.get("torch"), kind, None)
    return module is not None and bool(module.is_initialized())


def _ray() -> tuple[bool, str]:
    """Whether this process is a Ray actor, and the address of its cluster; without Ray loaded it is none."""
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return False, ""
        context = ray.get_runtime_context()
        return context.get_actor_id() is not None, str(context.gcs_address)
    except Exception as error:  # noqa: BLE001  (another version of it, or one that is being imported)
        log.debug("Ray does not say where this process is: %s", error)
        return False, ""
