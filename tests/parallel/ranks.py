"""Program of the test's ranks: imports torch once, then forks the ranks of one function after the other.

Usage: ``python -m tests.parallel.ranks FOLDER [FUNCTION ...]``: runs what RUNS lists, and the named ones on two ranks.
``FOLDER/<function>-<rank>`` gets what a rank returned, as JSON, ``FOLDER/<function>-codes`` the exit codes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from drumline.errors import ChannelClosedError, ConfigError
from drumline.parallel.groups import init_groups
from drumline.parallel.layout import GroupKind, Layout
from drumline.parallel.rendezvous import Rendezvous, create_rendezvous, tcp_init_method
from drumline.platforms import CudaPlatform

LIMIT_S = 60


def over_gloo(method: str) -> str:
    """The same meeting place without its memory."""
    return method.partition("?")[0]


def gloo_collectives(rank: int, size: int, method: str) -> dict[str, Any]:
    """As between machines, with all ranks on one."""
    return collectives(rank, size, over_gloo(method))


def collectives(rank: int, size: int, method: str) -> dict[str, Any]:
    """Every operation over a TP group of all ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "nonesuch0"  # of an outer job: on one machine it is loopback all the same
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    tp = groups.tp
    sizes = [3, 1, 2][:size]
    own = torch.full((2, sizes[rank]), float(rank))
    whole = torch.cat([torch.full((2, n), float(i)) for i, n in enumerate(sizes)], 1)
    into = torch.empty(size, 4)
    tp.all_gather_into(into, torch.full((4,), float(rank)))
    result = {
        "sum": tp.all_reduce(torch.full((3,), float(rank + 1))).tolist(),
        "max": tp.all_reduce(torch.tensor([rank, -rank]), "max").tolist(),
        "min": tp.all_reduce(torch.tensor([rank, -rank]), "min").tolist(),
        "half": tp.all_reduce(torch.ones(2, dtype=torch.bfloat16)).tolist(),
        "empty": list(tp.all_reduce(torch.empty(0, 4)).shape),
        "uneven": bool(torch.equal(tp.all_gather(own, -1, sizes), whole)),
        "uneven_first": bool(torch.equal(tp.all_gather(own.T, 0, sizes), whole.T)),
        "even": tp.all_gather(torch.tensor([[rank], [rank]]), 1).tolist(),
        "even_first": tp.all_gather(torch.tensor([[rank, 7]]), 0).tolist(),
        "middle": list(tp.all_gather(torch.zeros(2, sizes[rank], 5), -2, sizes).shape),
        "no_rows": list(tp.all_gather(torch.empty(0, sizes[rank]), 1, sizes).shape),
        "into": into[:, 0].tolist(),
        "all_to_all": _trade(tp),
        "no_bytes": list(tp.all_to_all(torch.empty(size, 0), [1] * size, [1] * size).shape),
        "scattered": tp.reduce_scatter(torch.arange(6.0).view(1, 6) * (rank + 1), 1, sizes).tolist(),
        "scattered_evenly": tp.reduce_scatter(torch.tensor([[rank], [5 - rank], [7]]), 0, op="max").tolist(),
        "scattered_nothing": list(tp.reduce_scatter(torch.empty(0, size), -1).shape),
        "scattered_half": tp.reduce_scatter(torch.ones(size, dtype=torch.bfloat16)).tolist(),
        "gathered": _listed(tp.gather(own, 1, -1, sizes)),
        "gathered_first": _listed(tp.gather(torch.tensor([rank]))),
        "broadcast": tp.broadcast(torch.tensor([rank * 10]), src=1).tolist(),
        "object": tp.broadcast_object({"rank": rank} if rank == 0 else None),
        "objects": tp.all_gather_object("x" * rank),
    }
    try:
        result["ring"] = _ring(tp)
    except ConfigError as error:
        result["ring"] = str(error)
    for _ in range(20):
        tp.barrier()
    result["listeners"] = sorted(
        {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    )
    result["sizes"] = {kind.value: groups[kind].size for kind in GroupKind if kind.value not in ("ep", "eplb")}
    result["default_group"] = torch.distributed.is_initialized()
    result["backend"] = groups.backend
    result["threads"] = sorted({(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()})
    groups.close()
    groups.close()
    return result


def strides(rank: int, size: int, method: str) -> dict[str, Any]:
    """Tensors that are not contiguous, beside such that are, are taken by their values."""
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    tp, values = groups.tp, torch.arange(6.0).view(2, 3)
    other = values.clone() if rank == 0 else values.t().contiguous().t()
    summed = tp.all_reduce(other)
    every_second = torch.zeros(2, 6)[:, ::2]
    got = tp.broadcast(values.clone() if rank == 0 else every_second)
    spread = torch.full((4, 4), float(rank))[:, ::2]
    result = {
        "same": summed is other,
        "sum": summed.tolist(),
        "broadcast": got.tolist(),
        "source": tp.broadcast(torch.arange(6.0).view(2, 3).t() if rank == 1 else torch.zeros(3, 2), 1).tolist(),
        "max": tp.all_reduce(spread, "max").unique().tolist(),
        "grad": tp.all_reduce(torch.ones(2, 4, requires_grad=True)[:, ::2]).tolist(),
    }
    groups.close()
    return result


def gloo_strides(rank: int, size: int, method: str) -> dict[str, Any]:
    """As between machines."""
    return strides(rank, size, over_gloo(method))


def refusals(rank: int, size: int, method: str) -> dict[str, Any]:
    """Arguments that no group has a use for: an error on each rank, before anything is sent."""
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    tp = groups.tp
    calls: list[Callable[[], Any]] = [
        *(lambda src=src: tp.broadcast(torch.ones(2), src) for src in (-1, size)),
        *(lambda dim=dim: tp.all_gather(torch.ones(2, 3), dim) for dim in (2, -3)),
        lambda: tp.gather(torch.ones(2, 3), 0, 5),
        lambda: tp.reduce_scatter(torch.tensor(1.0)),
        lambda: tp.all_to_all(torch.ones(0, 1), [1, -1], [1, -1]),
        lambda: tp.all_reduce(torch.ones(2), "avg"),
        lambda: tp.reduce_scatter(torch.ones(size), op="avg"),
        lambda: tp.all_gather_into(torch.ones(size, 2), torch.ones(3)),
        lambda: tp.all_gather_into(torch.ones(size, 3, dtype=torch.float64), torch.ones(3)),
        lambda: tp.all_gather_into(torch.ones(3, size).T, torch.ones(3)),
    ]
    errors = []
    for call in calls:
        try:
            call()
        except (ValueError, IndexError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    result = {"errors": errors, "after": tp.all_reduce(torch.ones(1)).item()}
    groups.close()
    return result


def gloo_refusals(rank: int, size: int, method: str) -> dict[str, Any]:
    """As between machines."""
    return refusals(rank, size, over_gloo(method))


def gloo_leaver(rank: int, size: int, method: str) -> dict[str, Any]:
    """A rank closes its groups while another waits for it: that one learns at once."""
    groups = init_groups(Layout(tp=size), rank, over_gloo(method), timeout_s=30)
    tp, error, start = groups.tp, "", 0.0
    tp.all_reduce(torch.ones(3))
    if rank == 0:
        groups.close()
        groups.close()
    else:
        start = time.monotonic()
    try:
        tp.all_reduce(torch.ones(3))
    except (RuntimeError, ChannelClosedError) as raised:
        error = type(raised).__name__ if rank else f"{type(raised).__name__}: {raised}"
    result = {"error": error, "fast": rank == 0 or time.monotonic() - start < 5}
    sockets = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_ESTABLISHED]
    result["connections"] = len(sockets) if rank == 0 else 0
    return result


def _trade(group: Any) -> list[list[int]]:
    """Member i sends i rows to each other one, and none to itself: [who, to whom, which row]."""
    me, size = group.rank_in_group, group.size
    sends = [0 if other == me else me for other in range(size)]
    rows = [[me, other, number] for other, count in enumerate(sends) for number in range(count)]
    receives = [0 if other == me else other for other in range(size)]
    mine = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    found: list[list[int]] = group.all_to_all(mine, sends, receives).tolist()
    return found


def _listed(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


def _ring(group: Any) -> int:
    """Each sends to the next and receives from the one before; even ones send first."""
    got = torch.zeros(1, dtype=torch.int64)
    mine = torch.tensor([group.rank_in_group])
    for turn in (0, 1):
        if group.is_first == (turn == 0):
            group.send(mine)
        else:
            group.recv(got)
    return int(got)


def stages(rank: int, size: int, method: str) -> dict[str, Any]:
    """PP groups beside TP groups: stages of one rank each."""
    groups = init_groups(Layout(pp=size), rank, method, timeout_s=30)
    value = torch.zeros(1)
    if groups.pp.is_first:
        groups.pp.send(torch.tensor([42.0]))
    elif groups.pp.rank_in_group == 1:
        groups.pp.recv(value)
    result = {"value": value.item(), "tp": groups.tp.size, "last": groups.pp.is_last, "ring": _ring(groups.pp)}
    result["sum"] = groups.pp.all_reduce(torch.ones(1)).item()
    result["world_ring"] = _ring(groups.world)
    result["threads"] = sorted({(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()})
    result["sockets"] = len(psutil.Process().net_connections("all"))
    groups.close()
    return result


def gloo_stages(rank: int, size: int, method: str) -> dict[str, Any]:
    """As between machines."""
    groups = init_groups(Layout(pp=size), rank, over_gloo(method), timeout_s=30)
    pp, got = groups.pp, []
    for data in (b"", b"tokens"):
        if pp.is_first:
            pp.send_bytes(data)
        got.append(pp.recv_bytes().decode())
        if not pp.is_first:
            pp.send_bytes(data)
    groups.close()
    return {"ring": got}


def tcp(rank: int, size: int, _method: str) -> dict[str, Any]:
    """As between machines: the leader's port, and gloo's listener on the address that the route to it has."""
    method = tcp_init_method("127.0.0.1", int(os.environ["PORT"]))
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30, one_machine=False)
    value = groups.tp.all_reduce(torch.ones(1)).item()
    groups.tp.barrier()
    listeners = {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    gloo = sorted({address.ip for address in listeners if address.port != int(os.environ["PORT"])})
    groups.tp.barrier()  # the leader serves the store: it must not leave first
    groups.close()
    return {"value": value, "gloo": gloo}


def two_worlds(rank: int, size: int, method: str) -> dict[str, Any]:
    """Two engines in one process: nothing global stands between them."""
    first = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    second = init_groups(Layout(tp=size), rank, os.environ["SECOND"], timeout_s=30)
    a = first.tp.all_reduce(torch.tensor([1.0]))
    b = second.tp.all_reduce(torch.tensor([10.0]))
    first.close()
    return {"a": a.item(), "b": b.item(), "after": second.tp.all_reduce(torch.tensor([2.0])).item()}


def killed(rank: int, size: int, method: str) -> dict[str, Any]:
    """The last rank dies by SIGKILL; the others, in a collective, get an error that says where."""
    tp = init_groups(Layout(tp=size), rank, method, timeout_s=60).tp
    tp.barrier()
    if tp.is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        tp.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return {"error": _text(error), "fast": time.monotonic() - start < 5}
    return {}


def gloo_killed(rank: int, size: int, method: str) -> dict[str, Any]:
    """The same between machines."""
    return killed(rank, size, over_gloo(method))


def _text(error: BaseException) -> str:
    return re.sub(r"pid \d+", "pid N", "\n".join([str(error), *getattr(error, "__notes__", [])]))


def late(rank: int, size: int, method: str) -> dict[str, Any]:
    """A rank that never comes to a collective: the others time out."""
    tp = init_groups(Layout(tp=size), rank, method, timeout_s=1).tp
    if rank == 0:
        try:
            tp.barrier()
        except RuntimeError as error:
            os.write(int(os.environ["SIGNAL_FD"]), b"x" * size)
            return {"error": _text(error)}
    else:
        os.read(int(os.environ["WAIT_FD"]), 1)
    return {}


def absent(rank: int, size: int, method: str) -> dict[str, Any]:
    """A rank that never joins the world."""
    if rank == 1:
        return {}
    try:
        init_groups(Layout(tp=size), rank, method, timeout_s=1)
    except RuntimeError as error:
        return {"error": _text(error)}
    return {}


def gpus(rank: int, size: int, method: str) -> dict[str, Any]:
    """A TP group of GPUs: tensors on the device over NCCL, objects and barriers over gloo, also in a CUDA graph."""
    platform = CudaPlatform()
    os.environ.update(platform.worker_environment(os.environ))
    device = platform.set_device(rank)
    groups = init_groups(Layout(tp=size), rank, method, "nccl", 60, device=device)
    tp = groups.tp
    sizes = list(range(1, size + 1))
    own = torch.full((2, sizes[rank]), float(rank), device=device)
    result = {
        "sum": tp.all_reduce(torch.full((3,), float(rank + 1), device=device)).tolist(),
        "cpu_sum": tp.all_reduce(torch.ones(1)).item(),
        "uneven": tp.all_gather(own, -1, sizes)[0].tolist(),
        "broadcast": tp.broadcast(torch.tensor([rank], device=device), src=size - 1).item(),
        "scattered": tp.reduce_scatter(torch.arange(3.0, device=device), 0, sizes).tolist(),
        "gathered": _listed(tp.gather(own[0], 1, 0, sizes)),
        "object": tp.broadcast_object("hello" if rank == 0 else None),
        "received": _gpu_pass(tp, device),
        "fast": [tp.all_reduce(torch.ones(n, device=device)).unique().tolist() for n in (1 << 10, 1 << 18, 1 << 23)],
        "choice": groups.all_reduce_choice is not None and groups.all_reduce_choice.is_fast,
    }
    static, graph = torch.ones(4, device=device), torch.cuda.CUDAGraph()
    platform.synchronize()
    with torch.cuda.graph(graph):
        tp.all_reduce(static)
    static.fill_(2.0)
    graph.replay()
    platform.synchronize()
    result["graph"] = static.tolist()
    del graph  # NCCL would wait for it when the groups are closed
    tp.barrier()
    result["contexts"] = torch.cuda.device_count() >= size and _contexts(size, rank)
    result["listeners"] = sorted(
        {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    )
    groups.close()
    return result


def _gpu_pass(group: Any, device: torch.device) -> float:
    value = torch.zeros(1, device=device)
    if group.is_first:
        group.send(value + 7)
    elif group.rank_in_group == 1:
        group.recv(value)
    return value.item()


def _contexts(size: int, rank: int) -> list[int]:
    """Devices on which this process holds memory."""
    return [index for index in range(size) if torch.cuda.memory_reserved(index)]


def _count(what: str) -> int:
    return len(list(Path("/proc/self", what).iterdir()))


def alone(rank: int, size: int, _method: str) -> dict[str, Any]:
    """A world of one opens nothing and starts no thread."""
    before = _count("fd")
    groups = init_groups(Layout(), rank, "")
    tp, value = groups.tp, torch.tensor([[1.0, 2.0]])
    out = torch.empty(1, 1, 2)
    tp.all_gather_into(out, value)
    tp.barrier()
    refused = []
    for call in (tp.send, tp.recv):
        try:
            call(value)
        except ValueError as error:
            refused.append("itself" in str(error))
    try:
        init_groups(Layout(tp=2), 0, "")
    except ConfigError as error:
        refused.append("init method" in str(error))
    try:
        _ = groups.ep
    except ConfigError as error:
        refused.append("--enable-expert-parallel" in str(error))
    result = {
        "same": tp.all_reduce(value) is value and tp.all_gather(value) is value and tp.broadcast(value) is value,
        "traded": tp.all_to_all(value, [1], [1]) is value,
        "objects": [tp.broadcast_object("x"), tp.all_gather_object("x")],
        "into": bool(out[0].equal(value)),
        "backend": groups.backend,
        "first_and_last": tp.is_first and tp.is_last,
        "refused": refused,
        "threads": _count("task"),
        "opened": _count("fd") - before,
    }
    groups.close()
    return result


RUNS: list[tuple[Callable[[int, int, str], dict[str, Any]], int]] = [
    (collectives, 3),
    (gloo_collectives, 3),
    (strides, 2),
    (gloo_strides, 2),
    (refusals, 2),
    (gloo_refusals, 2),
    (gloo_leaver, 2),
    (stages, 3),
    (gloo_stages, 2),
    (tcp, 2),
    (two_worlds, 2),
    (killed, 3),
    (gloo_killed, 3),
    (late, 2),
    (absent, 3),
    (alone, 1),
]


def run(
    function: Callable[[int, int, str], dict[str, Any]],
    size: int,
    out: Path,
    prepare: Callable[[Rendezvous, int], None] = lambda place, size: None,
) -> list[int]:
    """Fork the ranks of one function; their exit codes. What they return goes to files in ``out``."""
    first, second = create_rendezvous(size), create_rendezvous(size)
    prepare(first, size)
    wait, signal_ = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ["PORT"] = str(probe.getsockname()[1])
    os.environ.update(SECOND=second.init_method, WAIT_FD=str(wait), SIGNAL_FD=str(signal_))
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIMIT_S)
            code = 1
            try:
                (out / f"{function.__name__}-{rank}").write_text(json.dumps(function(rank, size, first.init_method)))
                code = 0
            except BaseException:  # noqa: BLE001  it is printed, and the test sees that something was
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                os._exit(code)
        pids.append(pid)
    for fd in (*first.fds, *second.fds, wait, signal_):
        os.close(fd)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main(out: Path, *more: str) -> None:
    torch.set_num_threads(1)
    for function, size in [*RUNS, *((globals()[name], 2) for name in more)]:
        codes = run(function, size, out)
        (out / f"{function.__name__}-codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
