"""Which environment variables a forked child can still be given.

A forked child has its interpreter and libraries loaded. Variables that they read while loading would have no effect
any more, so a child that wants other values than the fork server had is executed fresh. Everything else is read when
it is used (CUDA_VISIBLE_DEVICES by cuInit, NCCL_* and GLOO_* when a group is made) and is simply set.

Thread counts are the exception: the fork server needs OMP_NUM_THREADS=1 and kin for itself, and children set theirs
through torch, so these differ without harm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ONE_THREAD = dict.fromkeys(THREAD_VARIABLES, "1")

READ_AT_IMPORT = re.compile(
    r"LD_.*|GLIBC_TUNABLES|MALLOC_.*|_RJEM_MALLOC_CONF|JE_MALLOC_CONF"  # dynamic loader and allocators
    r"|PYTHON.*"  # the interpreter
    r"|OMP_.*|GOMP_.*|KMP_.*|MKL_.*|OPENBLAS_.*|BLIS_.*|VECLIB_.*"  # compute libraries
    r"|TORCH(?!_NCCL_|ELASTIC_|INDUCTOR_CACHE_DIR).*|PYTORCH_.*|ATEN_.*|TRITON_.*"
    r"|HF_.*|HUGGINGFACE_.*|TRANSFORMERS_.*|SAFETENSORS_.*"
)
"""Names (full match) of variables that are read while an interpreter or a library loads."""


OUTER_JOB = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_NAME"
    r"|ROLE_RANK|ROLE_WORLD_SIZE|TORCHELASTIC_.*"
)
"""Names (full match) of variables by which torchrun and its like tell a process its place in their job."""


def without_outer_job(environ: Mapping[str, str]) -> dict[str, None]:
    """Changes that keep an outer job's place from our processes: they have ranks of their own, and a library in them
    that found these variables would wait for the outer job's processes."""
    return {name: None for name in environ if OUTER_JOB.fullmatch(name)}


def needs_fresh(base: Mapping[str, str], changes: Mapping[str, str | None]) -> list[str]:
    """Names among ``changes`` whose new value a forked child would not notice; empty: fork."""
    return sorted(
        name
        for name, value in changes.items()
        if name not in THREAD_VARIABLES and READ_AT_IMPORT.fullmatch(name) and base.get(name) != value
    )


def import_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those of an environment that are read while an interpreter or a library loads; thread counts aside."""
    return {
        name: value for name, value in env.items() if name not in THREAD_VARIABLES and READ_AT_IMPORT.fullmatch(name)
    }


def root_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with ``changes`` (None removes), quiet waits, and a place for torch's compile cache.

    OpenMP's threads sleep at their barriers instead of spinning, unless the user says otherwise: with 2 threads on 2
    cores that others use too, a decode step's matrix products took 169 ms spinning and 41 ms sleeping.

    ``import torch._dynamo`` (transformers does it) makes a folder for that cache, by default below the temporary
    folder, and leaves it there.
    """
    env = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "TORCHINDUCTOR_CACHE_DIR" not in env:
        try:
            folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "drumline", "torchinductor")
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                env["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        except (OSError, RuntimeError):  # no home folder, or one that cannot be written to
            pass
    return env


def child_environment(base: Mapping[str, str], changes: Mapping[str, str | None], threads: int) -> dict[str, str]:
    """The child's whole environment. ``threads`` > 0 wins over the variables."""
    env = {name: value for name, value in {**base, **changes}.items() if value is not None}
    if threads > 0:
        env.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    return env
