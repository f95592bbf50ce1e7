"""Program of the ranks of test_shm.py, in the manner of ranks.py. All sequence words start just before they wrap."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from drumline.errors import CollectiveError, ConfigError
from drumline.parallel import boxes, shm
from drumline.parallel.boxes import Boxes
from drumline.parallel.groups import GroupCoordinator, init_groups
from drumline.parallel.layout import GroupKind, Layout
from drumline.parallel.rendezvous import Rendezvous, create_rendezvous, memory_of
from drumline.transport.memory import SharedMemory
from tests.parallel.ranks import run

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.float16]
if __name__ == "__main__":  # smaller than in earnest: tensors of several pieces are checked in less time
    boxes.SLOT_BYTES = shm.SLOT_BYTES = 256 << 10
SLOT_BYTES = shm.SLOT_BYTES
SIZES = [0, 1, 7, 576, 4096, shm.ONE_SHOT_BYTES // 4, shm.ONE_SHOT_BYTES // 4 + 1, 50_001]
NEAR_THE_WRAP = 2**32 - 20


def start_near_the_wrap(place: Rendezvous, size: int) -> None:
    boxes = Boxes(size)
    memory = SharedMemory.attach(place.memory)
    for kind in GroupKind:
        for rank in range(size):
            at = boxes.word_at(kind, rank)
            memory.buf[at : at + 4] = NEAR_THE_WRAP.to_bytes(4, sys.byteorder)
    for rank in range(size):
        for at in (boxes.sent_at(rank), boxes.taken_at(rank)):
            memory.buf[at : at + 4] = (2**32 - 64 * 100).to_bytes(4, sys.byteorder)
    memory.close()


class Model:
    """Makes what all ranks show and what the operations should give, the same on every rank, and compares bits."""

    def __init__(self, group: GroupCoordinator, seed: int) -> None:
        self.group = group
        self.random = random.Random(seed)
        self.digest = hashlib.sha256()
        self._generator = torch.Generator().manual_seed(seed)

    def tensors(self, shapes: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        made = []
        for shape in shapes:
            values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * 1000
            made.append(values.to(dtype))
        return made

    def check(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), (got, expected)
        self.digest.update(torch.cat([got.flatten()]).view(torch.uint8).numpy().tobytes())

    def all_reduce(self, big: bool = False) -> None:
        dtype, op = self.random.choice(DTYPES), self.random.choice(["sum", "max", "min"])
        numel = self.random.randint(SLOT_BYTES // 4, SLOT_BYTES) if big else self.random.choice(SIZES)
        shape = self.random.choice([[numel], [1, numel], [numel, 1, 2]])
        tensors = self.tensors([shape] * self.group.size, dtype)
        expected = _reduced(tensors, op)
        mine = tensors[self.group.rank_in_group]
        if self.random.random() < 0.3:  # not contiguous
            wide = torch.zeros(*shape[:-1], shape[-1] * 2, dtype=dtype)
            wide[..., ::2] = mine
            mine = wide[..., ::2]
        got = self.group.all_reduce(mine, op)
        assert got is mine
        self.check(got, expected)

    def reduce_scatter(self, big: bool = False) -> None:
        dtype, op = self.random.choice(DTYPES), self.random.choice(["sum", "max", "min"])
        dim = self.random.randint(-3, 2)
        sizes = [self.random.randint(0, 5) for _ in range(self.group.size)]
        shape = [self.random.randint(0, 4), SLOT_BYTES // 4 if big else self.random.randint(1, 50), 3]
        shape[dim] = sum(sizes)
        tensors = self.tensors([shape] * self.group.size, dtype)
        mine = tensors[self.group.rank_in_group].clone()
        if self.random.random() < 0.3:
            mine = mine.transpose(0, 2).contiguous().transpose(0, 2)
        expected = torch.split_with_sizes(_reduced(tensors, op), sizes, dim)[self.group.rank_in_group]
        got = self.group.reduce_scatter(mine, dim, sizes, op)
        assert got.is_contiguous()
        assert torch.equal(mine, tensors[self.group.rank_in_group])
        assert (got.dtype, got.shape) == (dtype, expected.shape)
        assert torch.equal(got, expected), (got, expected)

    def gather(self, big: bool = False) -> None:
        dst, dim = self.random.randrange(self.group.size), self.random.randint(-2, 1)
        sizes = [self.random.randint(0, 5) for _ in range(self.group.size)]
        other = SLOT_BYTES // 4 if big else self.random.randint(1, 50)
        shapes = [[size, other] if dim % 2 == 0 else [other, size] for size in sizes]
        tensors = self.tensors(shapes, self.random.choice(DTYPES))
        got = self.group.gather(tensors[self.group.rank_in_group], dst, dim, sizes)
        assert (got is None) == (dst != self.group.rank_in_group)
        assert got is None or torch.equal(got, torch.cat(tensors, dim))

    def all_gather(self, big: bool = False) -> None:
        shape = [self.random.randint(0, 4), self.random.randint(1, 50), self.random.randint(1, 3)]
        if big:
            shape[1] = SLOT_BYTES // 4
        dim = self.random.randint(-3, 2)
        sizes = [self.random.randint(0, 5) for _ in range(self.group.size)]
        shapes = [[*shape[: dim % 3], size, *shape[dim % 3 + 1 :]] for size in sizes]
        tensors = self.tensors(shapes, self.random.choice([*DTYPES, torch.bool, torch.uint8]))
        mine = tensors[self.group.rank_in_group]
        if self.random.random() < 0.3:
            mine = mine.transpose(0, 2).contiguous().transpose(0, 2)
        self.check(self.group.all_gather(mine, dim, sizes), torch.cat(tensors, dim))

    def all_gather_into(self, big: bool = False) -> None:
        shape = [self.random.randint(0, 5), SLOT_BYTES // 4 if big else 9]
        tensors = self.tensors([shape] * self.group.size, self.random.choice(DTYPES))
        output = tensors[0].new_empty(self.group.size, *shape)
        self.group.all_gather_into(output, tensors[self.group.rank_in_group])
        self.check(output, torch.stack(tensors))

    def broadcast(self, big: bool = False) -> None:
        src = self.random.randrange(self.group.size)
        tensors = self.tensors([[3, SLOT_BYTES // 8 if big else 5]] * self.group.size, self.random.choice(DTYPES))
        mine = tensors[self.group.rank_in_group]
        mine = mine.T.contiguous().T if self.random.random() < 0.3 else mine.clone()
        self.check(self.group.broadcast(mine, src), tensors[src])

    def all_to_all(self, big: bool = False) -> None:
        """Each row says who sent it, to whom, and which it is."""
        size, here = self.group.size, self.group.rank_in_group
        dtype, width = self.random.choice([*DTYPES, torch.bool]), self.random.choice([[], [0], [1], [3, 5], [257]])
        most = SLOT_BYTES // 64 if big else 6
        counts = [[self.random.choice([0, 0, self.random.randint(0, most)]) for _ in range(size)] for _ in range(size)]
        if self.random.random() < 0.1:
            counts = [[0] * size] * size
        rows = [[self.tensors([[count, *width]], dtype)[0] for count in row] for row in counts]
        mine = torch.cat(rows[here])
        if self.random.random() < 0.3 and len(width) == 2:
            mine = mine.transpose(0, 2).contiguous().transpose(0, 2)
        got = self.group.all_to_all(mine, counts[here], [row[here] for row in counts])
        expected = torch.cat([row[here] for row in rows])
        assert got.dtype == dtype
        assert torch.equal(got, expected), (got, expected)

    def objects(self, big: bool = False) -> None:
        sizes = [self.random.choice([0, 1, 100, SLOT_BYTES, 3 * SLOT_BYTES if big else 10]) for _ in self.group.ranks]
        mine = {"size": "x" * sizes[self.group.rank_in_group]}
        assert self.group.all_gather_object(mine) == [{"size": "x" * size} for size in sizes]
        value = self.group.broadcast_object(mine if self.group.is_first else "ignored")
        assert value == {"size": "x" * sizes[0]}

    def barrier(self, big: bool = False) -> None:
        self.group.barrier()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            operation = self.random.choice([self.all_reduce] * 4 + [self.all_gather] * 3 + self.others)
            operation(big=self.random.random() < 0.02)

    @property
    def others(self) -> list[Callable[..., None]]:
        return [
            self.all_gather_into,
            self.all_to_all,
            self.broadcast,
            self.objects,
            self.barrier,
            self.gather,
            self.reduce_scatter,
        ]


def _reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    wide = op == "sum" and tensors[0].dtype in (torch.bfloat16, torch.float16)
    result = tensors[0].float() if wide else tensors[0].clone()
    for other in tensors[1:]:
        if op == "sum":
            result = result + (other.float() if wide else other)
        else:
            result = {"max": torch.maximum, "min": torch.minimum}[op](result, other)
    return result.to(tensors[0].dtype)


def random_operations(rank: int, size: int, method: str) -> dict[str, Any]:
    """Hundreds of operations of every kind, size and type, half of them in inference mode."""
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    model = Model(groups.tp, 7 + size)
    model.run(1000 // size)
    with torch.inference_mode():
        model.run(1000 // size)
    model.run(20)
    groups.close()
    return {"digest": model.digest.hexdigest()}


def random_2(rank: int, size: int, method: str) -> dict[str, Any]:
    return random_operations(rank, size, method)


def random_3(rank: int, size: int, method: str) -> dict[str, Any]:
    return random_operations(rank, size, method)


def random_5(rank: int, size: int, method: str) -> dict[str, Any]:
    return random_operations(rank, size, method)


def interleaved(rank: int, size: int, method: str) -> dict[str, Any]:
    """Groups of three kinds in one random order, with ranks that dawdle."""
    groups = init_groups(Layout(tp=2, pcp=size // 2), rank, method, timeout_s=30)
    layout, order, own = groups.layout, random.Random(3), random.Random(rank)
    kinds = [GroupKind.WORLD, GroupKind.TP, GroupKind.PCP]
    for turn in range(1500):
        group = groups[order.choice(kinds)]
        got = group.all_reduce(torch.tensor([float(turn), 2.0**rank]))
        assert got.tolist() == [turn * group.size, sum(2.0**r for r in layout.group_of(group.kind, rank))]
        if own.random() < 0.01:
            time.sleep(0.001)
    groups.close()
    return {}


def many(rank: int, size: int, method: str) -> dict[str, Any]:
    """Thousands of calls back to back: each sees exactly its own turn's values. And more shapes than are kept."""
    tp = init_groups(Layout(tp=size), rank, method, timeout_s=30).tp
    value = torch.empty(16)
    for turn in range(8000):
        tp.all_reduce(value.fill_(turn * (rank + 1)))
        assert value[0] == value[15] == turn * 3
    for numel in range(1, 1200):
        assert tp.all_reduce(torch.ones(numel))[-1] == 2
    return {}


def slow(rank: int, size: int, method: str) -> dict[str, Any]:
    """One rank comes late: the others sleep meanwhile."""
    tp = init_groups(Layout(tp=size), rank, method, timeout_s=30).tp
    used = time.process_time()
    for _ in range(10):
        if tp.is_last:
            time.sleep(0.05)
        assert tp.all_reduce(torch.ones(100))[0] == size
    return {"cpu_ms": (time.process_time() - used) * 1e3}


def _wakes() -> int:
    """Times that threads of this process went to sleep so far."""
    lines = [line for task in Path("/proc/self/task").iterdir() for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def idle(rank: int, size: int, method: str) -> dict[str, Any]:
    """Groups that are not used cost nothing."""
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    groups.tp.barrier()
    before = _wakes()
    time.sleep(1.0)
    wakes = _wakes() - before
    groups.tp.barrier()
    process = psutil.Process()
    return {"wakes": wakes, "threads": process.num_threads(), "sockets": len(process.net_connections("all"))}


def few_cores(rank: int, size: int, method: str) -> dict[str, Any]:
    """More ranks than cores: nobody watches words for long."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    world = shm.World(memory_of(method) or -1, size, rank, 30)
    group = world.group(GroupKind.WORLD, range(size))
    for _ in range(300):
        group.all_reduce(torch.ones(10), "sum")
    world.close()
    return {"spin_ns": world.spin_ns}


def leaver(rank: int, size: int, method: str) -> dict[str, Any]:
    """A rank closes its groups while another waits for it: that one learns at once, and so do later calls."""
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    errors = []
    if rank == 0:
        _until_sleeping(os.getppid(), rank=1)
        groups.close()
        try:
            groups.tp.all_reduce(torch.ones(3))
        except Exception as error:  # noqa: BLE001  any will do, but a crash
            errors.append(type(error).__name__)
        return {"errors": errors}
    start = time.monotonic()
    for _ in range(2):
        try:
            groups.tp.all_reduce(torch.ones(3))
        except CollectiveError as error:
            errors.append(str(error))
    return {"errors": errors, "fast": time.monotonic() - start < 5}


def _until_sleeping(parent: int, rank: int) -> None:
    """Until the rank (in the order of forking) sleeps, and goes on sleeping."""
    child = psutil.Process(parent).children()[rank]
    seen, deadline = 0, time.monotonic() + 10
    while seen < 10 and time.monotonic() < deadline:
        seen = seen + 1 if child.status() == psutil.STATUS_SLEEPING else 0
        time.sleep(0.003)


class Stop(Exception):
    pass


def signals(rank: int, size: int, method: str) -> dict[str, Any]:
    """A Python signal handler runs in the middle of a wait: one that returns, then one that raises."""
    tp = init_groups(Layout(tp=size), rank, method, timeout_s=30).tp
    if rank:
        first = psutil.Process(os.getppid()).children()[0].pid
        for number in (signal.SIGUSR1, signal.SIGTERM):
            _until_sleeping(os.getppid(), rank=0)
            os.kill(first, number)
            os.read(int(os.environ["WAIT_FD"]), 1)  # until the handler has run
            if number == signal.SIGUSR1:
                tp.barrier()
        return {}
    ran = []

    def note(number: int, frame: Any) -> None:
        ran.append(number)
        os.write(int(os.environ["SIGNAL_FD"]), b"x")

    def stop(number: int, frame: Any) -> None:
        note(number, frame)
        raise Stop

    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGTERM, stop)
    tp.barrier()
    before = list(ran)
    try:
        tp.barrier()
    except Stop:
        return {"before": before, "stopped": True}
    return {}


def missing(rank: int, size: int, method: str) -> dict[str, Any]:
    """Two of four ranks do not come."""
    tp = init_groups(Layout(tp=size), rank, method, timeout_s=0.3).tp
    if rank in (0, 2):
        try:
            tp.all_gather(torch.ones(1))
        except CollectiveError as error:
            os.write(int(os.environ["SIGNAL_FD"]), b"x")
            return {"error": str(error)}
    os.read(int(os.environ["WAIT_FD"]), 1)
    return {}


def misuse(rank: int, size: int, method: str) -> dict[str, Any]:
    """What is refused with a sentence; and tensors that want a gradient."""
    groups = init_groups(Layout(tp=size), rank, method, timeout_s=30)
    errors = []
    other = create_rendezvous(size + 1)
    for layout, place in ((Layout(tp=size), method), (Layout(tp=size + 2), other.init_method)):
        try:
            init_groups(layout, rank, place, timeout_s=1)
        except ConfigError as error:
            errors.append(str(error).partition(":")[0])
    other.close()
    for call in (
        lambda: groups.tp.all_reduce(torch.ones(1), "product"),
        lambda: groups.tp.all_gather(torch.ones(1, 2), 1, [2, 3, 4]),
        lambda: groups.tp.send(torch.ones(1)),
        lambda: groups.tp.reduce_scatter(torch.ones(3)),
        lambda: groups.tp.reduce_scatter(torch.ones(3), 0, [1, 1]),
        lambda: groups.tp.gather(torch.ones(3), size),
        lambda: groups.tp.all_to_all(torch.ones(2), [1, 2], [1, 1]),
        lambda: groups.tp.all_to_all(torch.ones(2), [1, 1], [0, 1] if rank == 0 else [1, 0]),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    leaf = torch.ones(4, requires_grad=True)
    gradless = groups.tp.all_reduce(leaf * 2)
    plain = groups.tp.all_reduce(torch.ones(4))
    try:  # rank 0 has two rows for rank 1, which counts on one
        groups.tp.all_to_all(torch.ones(2), [0, 2], [0, 0]) if rank == 0 else groups.tp.all_to_all(
            torch.ones(0), [0, 0], [1, 0]
        )
    except CollectiveError as error:
        errors.append(str(error))
    return {"errors": errors, "value": gradless.tolist(), "tracks": plain.requires_grad}


RUNS: list[tuple[Callable[[int, int, str], dict[str, Any]], int]] = [
    (random_2, 2),
    (random_3, 3),
    (random_5, 5),
    (interleaved, 4),
    (many, 2),
    (slow, 3),
    (idle, 2),
    (few_cores, 2),
    (leaver, 2),
    (signals, 2),
    (missing, 4),
    (misuse, 2),
]


def main(out: Path, *only: str) -> None:
    torch.set_num_threads(1)
    for function, size in RUNS:
        if not only or function.__name__ in only:
            start = time.monotonic()
            codes = run(function, size, out, start_near_the_wrap)
            (out / f"{function.__name__}-codes").write_text(json.dumps(codes))
            (out / f"{function.__name__}-seconds").write_text(str(time.monotonic() - start))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
