"""Names of processes: one rule for titles, log prefixes, log files and reports.

The root's title also tells all others that it has been told to end. A SIGTERM often goes to every process of a run
(``timeout``, systemd's default, ``killpg``): the root drains, and who else acted on its own copy would break the very
requests that are to be finished. So a process of ours that gets one waits a moment for the root to say that it got one
too, and then leaves the end to it. A title needs no descriptor that every way of making a child would have to pass on,
and shows in ps.
"""

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
COPIED_FORK_SERVER = "ForkServer_warm"
"""One that is there to be copied."""
DP_COORDINATOR = "DPCoordinator"


_ENDING = " (ending)"


def set_title(name: str, *, ending: bool = False) -> None:
    """Show the process as ``drumline::<name>`` in ps and top; one that was told to end, or to drain, says so."""
    import setproctitle

    setproctitle.setproctitle(f"drumline::{name}{_ENDING if ending else ''}")


def is_ending(pid: int) -> bool:
    """Whether that process says in its title that it was told to end. False where titles cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0 ").endswith(_ENDING.encode())
    except OSError:
        return False
