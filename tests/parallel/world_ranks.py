"""Program of the ranks of test_worlds.py: each function forks the ranks of several worlds itself.

Usage: ``python -m tests.parallel.world_ranks FOLDER [FUNCTION ...]``: what a function returned goes to
``FOLDER/<function>-0`` as JSON.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from drumline.config import ParallelConfig
from drumline.errors import CollectiveError, ConfigError
from drumline.parallel import fast
from drumline.parallel.boxes import MARKS
from drumline.parallel.fast_choice import Place
from drumline.parallel.groups import Groups, Timeouts, init_groups
from drumline.parallel.layout import GroupKind, Layout, global_rank
from drumline.parallel.meeting import Members, Numbers
from drumline.parallel.rendezvous import bind_store, create_rendezvous, memory_of, tcp_init_method
from drumline.parallel.standing import Standings
from drumline.parallel.stateless import StatelessGroup

LIMIT_S = 60


class Team:
    """Forked ranks."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, int]] = []

    def fork(self, function: Callable[..., Any], *arguments: Any) -> None:
        """One more; it runs the function."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIMIT_S)
            code = 1
            try:
                os.write(write, json.dumps(function(*arguments)).encode())
                code = 0
            except BaseException:  # noqa: BLE001  it is printed, and the test sees that something was
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                os._exit(code)
        os.close(write)
        self._ends.append((pid, read))

    def results(self) -> list[Any]:
        """What they returned, in order; exit codes of those that returned nothing."""
        found = []
        for pid, read in self._ends:
            with os.fdopen(read, "rb") as pipe:
                data = pipe.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            found.append(json.loads(data) if data else code)
        self._ends.clear()
        return found


def total(groups: Groups, value: float = 1.0) -> float:
    return groups.world.all_reduce(torch.tensor([value])).item()


def spanning() -> Any:
    """Two engines of TP 2 whose experts talk: one WORLD."""
    place, team = create_rendezvous(4), Team()

    def rank_of(engine: int, rank: int) -> Any:
        parallel = ParallelConfig(
            tensor_parallel_size=2, data_parallel_size=2, data_parallel_rank=engine, enable_expert_parallel=True
        )
        layout, mine = Layout.of(parallel, span_engines=True), global_rank(parallel, rank)
        experts = {"expert_parallel": True, "expert_balancing": True}
        groups = init_groups(layout, mine, place.init_method, timeout_s=30, **experts)
        kinds = (GroupKind.WORLD, GroupKind.TP, GroupKind.DP, GroupKind.EP, GroupKind.EPLB)
        sums = {kind: groups[kind].all_reduce(torch.tensor([2.0**mine])).item() for kind in kinds}
        groups.close()
        return {"rank": mine, "sums": sums}

    for engine in (0, 1):
        for rank in (0, 1):
            team.fork(rank_of, engine, rank)
    place.close()
    return team.results()


def replicas() -> Any:
    """Two dense engines, each with a WORLD of its own: one loses a rank and is made again, the other never notices."""
    steady, lost, again = (create_rendezvous(2) for _ in range(3))
    turn, go = os.pipe()
    team = Team()

    def goes_on(rank: int) -> Any:
        groups = init_groups(Layout.of(ParallelConfig(tensor_parallel_size=2)), rank, steady.init_method, timeout_s=30)
        before = total(groups)
        os.read(turn, 1)  # until the other engine has been restarted
        return {"before": before, "after": total(groups)}

    def loses(rank: int) -> Any:
        groups = init_groups(Layout(tp=2), rank, lost.init_method, timeout_s=30)
        total(groups)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return total(groups)
        except CollectiveError as error:
            return "has died" in str(error)

    def restarted(rank: int) -> Any:
        return total(init_groups(Layout(tp=2), rank, again.init_method, timeout_s=30))

    for rank in (0, 1):
        team.fork(goes_on, rank)
    other = Team()
    for rank in (0, 1):
        other.fork(loses, rank)
    first = other.results()
    for rank in (0, 1):
        other.fork(restarted, rank)
    second = other.results()
    os.write(go, b"xx")
    return {"lost": first, "restarted": second, "steady": team.results()}


def stateless() -> Any:
    """Three engine cores: two stateless groups beside a WORLD, one through memory and one over gloo."""
    world, small, far, team = create_rendezvous(3), create_rendezvous(3), create_rendezvous(3), Team()

    def core(rank: int) -> Any:
        groups = init_groups(Layout(dp=3), rank, world.init_method, timeout_s=30)
        over_gloo = far.init_method.partition("?")[0]
        with StatelessGroup(rank, 3, small.init_method, 30) as near, StatelessGroup(rank, 3, over_gloo, 30) as wide:
            found = {
                "any left": near.all_reduce(torch.tensor([int(rank == 2), rank]), "max").tolist(),
                "objects": near.all_gather_object({"rank": rank}),
                "from 1": near.broadcast_object("one" if rank == 1 else None, 1),
                "gloo": wide.all_reduce(torch.tensor([rank])).item(),
                "gloo from 2": wide.broadcast_object([rank], 2),
                "world": total(groups),
                "text": repr(near),
            }
        try:
            near.barrier()
        except Exception as error:  # noqa: BLE001  any will do, but a crash
            found["closed"] = type(error).__name__
        found["world after"] = total(groups)
        return found

    for rank in range(3):
        team.fork(core, rank)
    return team.results()


def stateless_alone() -> Any:
    """A group of one needs nothing; what cannot be is refused; one that nobody joins ends."""
    found: dict[str, Any] = {}
    with StatelessGroup(0, 1, "") as alone:
        found["objects"] = alone.all_gather_object("x")
    place = create_rendezvous(2)
    for name, arguments in {"rank": (2, 2, "x"), "method": (0, 2, ""), "late": (0, 2, place.init_method, 0.2)}.items():
        try:
            StatelessGroup(*arguments)
        except (ConfigError, CollectiveError) as error:
            found[name] = str(error)
    return found


def tcp_store() -> Any:
    """A store that rank 0 serves on a socket that was bound before: by create_rendezvous, and between machines."""
    team = Team()
    place = create_rendezvous(2, tcp=True)
    method = place.init_method
    for rank in (0, 1):
        team.fork(_over_tcp, rank, method.replace(f"&shm={place.memory}", ""), True)
    place.close()
    on_one, port = team.results(), str(urlsplit(method).port)
    listener = bind_store("127.0.0.1")
    several = tcp_init_method(*listener.getsockname(), listen=listener.fileno())
    for rank in (0, 1):
        team.fork(_over_tcp, rank, several, False)
    listener.close()
    return {"one machine": on_one, "several": team.results(), "method": method.replace(port, "PORT")}


def _over_tcp(rank: int, method: str, one_machine: bool) -> Any:
    groups = init_groups(Layout(tp=2), rank, method, timeout_s=30, one_machine=one_machine)
    value = total(groups)
    groups.tp.barrier()
    found = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    groups.tp.barrier()  # rank 0 serves the store: it must not leave first
    groups.close()
    return {"sum": value, "listeners": sorted(found)}


def timeouts() -> Any:
    """A kind, and the CPU side, may give up sooner than the rest."""
    place, team = create_rendezvous(4), Team()
    wait, over = os.pipe()
    layout = Layout(tp=2, pp=2)

    def rank_of(rank: int) -> Any:
        times = Timeouts(30, 20, {GroupKind.TP: 0.2, GroupKind.PP: 0.3})
        groups = init_groups(layout, rank, place.init_method, timeout_s=times)
        found = []
        if rank == 0:
            for call in (groups.tp.barrier, lambda: groups.pp.recv_bytes(1)):
                try:
                    call()
                except CollectiveError as error:
                    found.append(str(error))
            os.write(over, b"xxx")
        else:
            os.read(wait, 1)
        try:
            return {"errors": found, "world": total(groups)}
        except CollectiveError as error:
            return {"errors": [*found, str(error)]}

    for rank in range(4):
        team.fork(rank_of, rank)
    defaults = Timeouts(5)
    alone = [defaults.device(GroupKind.TP), defaults.cpu(GroupKind.TP), Timeouts(5, 2).cpu(GroupKind.WORLD)]
    return {"ranks": team.results(), "alone": alone}


def sources() -> Any:
    """Objects of TP come from its first member; WORLD, with the same ranks, takes any source. Large ones wrap."""
    place, team = create_rendezvous(2), Team()

    def rank_of(rank: int) -> Any:
        groups = init_groups(Layout(tp=2), rank, place.init_method, timeout_s=30)
        found = []
        for call in (
            lambda: groups.tp.broadcast_object("x", 1),
            lambda: groups.tp.broadcast_tensor_dict({"x": 1}, 1),
            lambda: groups.world.broadcast_object("x", 2),
            lambda: groups.tp.broadcast_tensor_dict(),
        ):
            try:
                call()
            except ValueError as error:
                found.append(str(error))
            if len(found) == 3 and rank == 1:
                break  # it would wait for the first one, which has nothing to send
        large = "x" * (5 << 20)
        return {
            "errors": found,
            "world": groups.world.broadcast_object(f"from {rank}", 1),
            "large": groups.tp.broadcast_object(large if rank == 0 else None) == large,
        }

    for rank in (0, 1):
        team.fork(rank_of, rank)
    return team.results()


def dicts() -> Any:
    """Dicts of tensors down a pipeline of three, and to all; through memory, and over gloo."""
    found = {}
    for name in ("memory", "gloo"):
        place, team = create_rendezvous(3), Team()
        method = place.init_method if name == "memory" else place.init_method.partition("?")[0]
        for rank in range(3):
            team.fork(_dicts_of, rank, method)
        place.close()
        found[name] = team.results()
    return found


def _dicts_of(rank: int, method: str) -> Any:
    groups = init_groups(Layout(pp=3), rank, method, timeout_s=30)
    pp = groups.pp
    got: dict[str, Any] = {"hidden": torch.arange(6.0).view(2, 3).T, "step": 7}
    got |= {"half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0, 4), "scalar": torch.tensor(3)}
    if not pp.is_first:
        got = pp.recv_tensor_dict()
    if not pp.is_last:
        pp.send_tensor_dict({**got, "seen": [*got.get("seen", []), rank]})
    mine = {"from": rank, "large": torch.full((400_000,), float(rank)), "none": None}
    spread = groups.world.broadcast_tensor_dict(mine if rank == 1 else None, 1)
    groups.close()
    return {
        "seen": got.get("seen"),
        "hidden": got["hidden"].tolist(),
        "half": [str(got["half"].dtype), got["half"].tolist()],
        "rest": [got["step"], list(got["empty"].shape), got["scalar"].item()],
        "spread": [spread["from"], spread["none"], list(spread["large"].shape), spread["large"].unique().tolist()],
    }


def numbers() -> Any:
    """What ranks give to their devices is numbered, and read from outside."""
    place, layout = create_rendezvous(3), Layout(tp=3)
    standings = Standings(place.memory, layout)
    team = Team()

    def rank_of(rank: int) -> Any:
        members = Members(memory_of(place.init_method) or -1, 3, rank, 30)
        number = Numbers(members, GroupKind.TP)
        for _ in range(5 if rank else 4):
            number(MARKS["all_gather"])
        number(MARKS["all_reduce"])
        members.close()
        return True

    before = [standings.words(rank) for rank in range(3)]
    for rank in range(3):
        team.fork(rank_of, rank)
    team.results()
    changed = [standings.words(rank) != words for rank, words in enumerate(before)]
    texts = [(one.rank, one.text(), one.waits_for) for one in standings.read()]
    standings.close()
    place.close()
    return {"changed": changed, "texts": texts}


class Memory:
    """Stands for memory on GPUs."""

    def __init__(self) -> None:
        self.closed = False
        self.one_shot = self.two_shot = None

    def close(self) -> None:
        self.closed = True


def fast_choices() -> Any:
    """Ranks agree about the fast all-reduce: over made-up places and probes, and where one cannot map its memory."""
    place, team = create_rendezvous(4), Team()

    def rank_of(rank: int) -> Any:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=(lines := io.StringIO()))
        groups = init_groups(Layout(tp=4), rank, place.init_method, timeout_s=30)
        tp, asked, made = groups.tp, [], []

        def make(capacity: int, name: str) -> Any:
            if case["fails"] and rank == 2:
                raise RuntimeError("CUDA driver error: 801\nand a trace")
            made.append((capacity, name, Memory()))
            return made[-1][2]

        def probe(devices: Any) -> Any:
            asked.append(list(devices))
            return {(a, b): case["broken"].get((a, b), "") for a in devices for b in devices if a < b}

        found = []
        own = Place(node="a", device=3 - rank, capability=(9, 0))
        case: dict[str, Any] = {}
        for changes in ({}, {"broken": {(0, 2): "the driver says so"}}, {"fails": True}, {"disabled": True}):
            case = {"broken": {}, "fails": False, "disabled": False} | changes
            communicator, choice = fast.set_up(tp, rank, own, make, disabled=case["disabled"], probe=probe)
            fast.tell(groups.world, rank, tp.ranks, choice)
            closed = [memory.closed for *_, memory in made]
            names = len({name for _, name, _ in made})
            found.append([communicator is not None, choice.reason, len(asked), closed, names])
        shared = len(set(tp.all_gather_object(made[0][1])))
        return {"found": found, "capacity": made[0][0], "shared": shared, "lines": lines.getvalue().splitlines()}

    for rank in range(4):
        team.fork(rank_of, rank)
    return team.results()


RUNS = [fast_choices, spanning, replicas, stateless, stateless_alone, tcp_store, timeouts, sources, dicts, numbers]


def main(out: Path, *only: str) -> None:
    torch.set_num_threads(1)
    for function in RUNS:
        if only and function.__name__ not in only:
            continue
        (out / f"{function.__name__}-0").write_text(json.dumps(function()))
        (out / f"{function.__name__}-codes").write_text(json.dumps([0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
