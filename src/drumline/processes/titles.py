"""Names of processes: one rule for titles, log prefixes, log files and reports. Pure."""

from __future__ import annotations


def worker_name(
    *,
    dp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
    pcp: tuple[int, int] = (0, 1),
    tp: tuple[int, int] = (0, 1),
    dcp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    expert_parallel: bool = False,
) -> str:
    """``Worker_DP0_PP0_TP3``: each argument is (rank, size); only sizes > 1 are named, EP only with expert parallel."""
    places = [("DP", dp), ("PP", pp), ("PCP", pcp), ("TP", tp), ("DCP", dcp)]
    if expert_parallel:
        places.append(("EP", ep))
    return "_".join(["Worker", *(f"{kind}{rank}" for kind, (rank, size) in places if size > 1)])


def starting_worker_name(global_rank: int) -> str:
    """``Worker_3``: what a worker is called until its groups exist."""
    return f"Worker_{global_rank}"


def api_server_name(index: int = 0) -> str:
    """``APIServer_0``."""
    return f"APIServer_{index}"


def engine_core_name(dp_rank: int = 0) -> str:
    """``EngineCore_DP0``."""
    return f"EngineCore_DP{dp_rank}"


FORK_SERVER = "ForkServer"
SPARE_FORK_SERVER = "ForkServer_spare"
"""Until it is needed."""
DP_COORDINATOR = "DPCoordinator"


def set_title(name: str) -> None:
    """Show the process as ``drumline::<name>`` in ps and top."""
    import setproctitle

    setproctitle.setproctitle(f"drumline::{name}")
