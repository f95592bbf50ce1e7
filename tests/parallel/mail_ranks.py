"""Program of the ranks of test_mail.py, in the manner of shm_ranks.py. All words start just before they wrap."""

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

from drumline.errors import ChannelClosedError, CollectiveError, ConfigError
from drumline.parallel.boxes import MAIL_BYTES
from drumline.parallel.groups import GroupCoordinator, init_groups
from drumline.parallel.layout import Layout
from drumline.parallel.mail import PIECE_BYTES
from tests.parallel.ranks import _text, run
from tests.parallel.shm_ranks import _until_sleeping, _wakes, start_near_the_wrap

SIZES = [0, 1, 63, 64, 65, 1000, 20_000, PIECE_BYTES - 64, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1]


def pipeline(rank: int, size: int, method: str, tp: int = 1) -> GroupCoordinator:
    return init_groups(Layout(pp=size // tp, tp=tp), rank, method, timeout_s=30).pp


def random_messages(rank: int, size: int, method: str) -> dict[str, Any]:
    """Tensors and bytes of all sizes go down the pipeline, some longer than the ring; each stage adds its mark.

    Stages dawdle at random. The last one sends a digest of each to the first, which reads them some messages later.
    """
    pp, order, own = pipeline(rank, size, method, tp=2), random.Random(5), random.Random(rank)
    sizes = [order.choice(SIZES) if order.random() < 0.99 else MAIL_BYTES + 12_345 for _ in range(600)]
    late, owed = 0, []
    for number, length in enumerate(sizes):
        message = torch.full((length,), number % 100, dtype=torch.uint8)
        if not pp.is_first:
            message.zero_()
            pp.recv(message)
            assert bool((message == number % 100 + pp.rank_in_group - 1).all()), number
            message += 1
        if own.random() < 0.02:
            time.sleep(0.003)
        if not pp.is_last:
            pp.send(message)
            message.fill_(255)  # it may be changed once it was sent
        else:
            pp.send_bytes(hashlib.sha256(message.numpy().tobytes()).digest())
        if pp.is_first:
            owed.append(hashlib.sha256(bytes([number % 100 + pp.size - 1] * length)).digest())
            while len(owed) > late:
                assert pp.recv_bytes() == owed.pop(0)
            late = own.randint(0, 5)
    while owed:
        assert pp.recv_bytes() == owed.pop(0)
    return {}


def types(rank: int, size: int, method: str) -> dict[str, Any]:
    """Every type arrives as it was, in inference mode too."""
    pp = pipeline(rank, size, method)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        value = torch.arange(60).view(3, 20).remainder(2 if dtype == torch.bool else 50).to(dtype)
        with torch.inference_mode():
            if pp.is_first:
                pp.send(value)
            else:
                assert torch.equal(pp.recv(torch.empty_like(value)), value)
    return {}


def early(rank: int, size: int, method: str) -> dict[str, Any]:
    """As long as the ring has room, sending waits for nobody; then it does."""
    pp = pipeline(rank, size, method)
    message = torch.ones(PIECE_BYTES - 64, dtype=torch.uint8)
    if pp.is_first:
        for _ in range(MAIL_BYTES // PIECE_BYTES):
            pp.send(message)
        os.write(int(os.environ["SIGNAL_FD"]), b"x")  # not one has been read
        pp.send(message)
        return {}
    os.read(int(os.environ["WAIT_FD"]), 1)
    _until_sleeping(os.getppid(), rank=0)
    for _ in range(MAIL_BYTES // PIECE_BYTES + 1):
        assert int(pp.recv(torch.empty_like(message)).sum()) == len(message)
    return {}


def slow(rank: int, size: int, method: str) -> dict[str, Any]:
    """The stage before is slow: the next one sleeps."""
    pp = pipeline(rank, size, method)
    used = time.process_time()
    for _ in range(20):
        if pp.is_first:
            time.sleep(0.02)
            pp.send_bytes(b"x")
        else:
            pp.recv_bytes()
    return {"cpu_ms": (time.process_time() - used) * 1e3}


def idle(rank: int, size: int, method: str) -> dict[str, Any]:
    """A pipeline in which nothing moves costs nothing."""
    pp = pipeline(rank, size, method)
    pp.barrier()
    before = _wakes()
    time.sleep(1.0)
    wakes = _wakes() - before
    pp.barrier()
    process = psutil.Process()
    return {"wakes": wakes, "threads": process.num_threads(), "sockets": len(process.net_connections("all"))}


def killed(rank: int, size: int, method: str) -> dict[str, Any]:
    """The middle stage dies by SIGKILL: the one before waits for room, the one after for a message."""
    pp = pipeline(rank, size, method)
    pp.barrier()
    if rank == 1:
        _until_sleeping(os.getppid(), rank=0)
        _until_sleeping(os.getppid(), rank=2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if rank == 0:
            pp.send(torch.ones(MAIL_BYTES))
        else:
            pp.recv(torch.ones(1))
    except CollectiveError as error:
        return {"error": _text(error)}
    return {}


def leaver(rank: int, size: int, method: str) -> dict[str, Any]:
    """A stage sends and closes its groups: what it sent is read, then the next one learns at once."""
    groups = init_groups(Layout(pp=size), rank, method, timeout_s=30)
    if rank == 0:
        groups.pp.send_bytes(b"last words")
        _until_sleeping(os.getppid(), rank=1)
        groups.close()
        try:
            groups.pp.send_bytes(b"")
        except ChannelClosedError as error:
            return {"error": str(error)}
        return {}
    words, start = groups.pp.recv_bytes(), time.monotonic()
    try:
        groups.pp.recv_bytes()
    except CollectiveError as error:
        return {"words": words.decode(), "error": str(error), "fast": time.monotonic() - start < 5}
    return {}


def late(rank: int, size: int, method: str) -> dict[str, Any]:
    """No message comes in time."""
    pp = init_groups(Layout(pp=size), rank, method, timeout_s=0.3).pp
    return _in_vain(not pp.is_first, lambda: pp.recv(torch.ones(1)))


def full(rank: int, size: int, method: str) -> dict[str, Any]:
    """Nobody makes room in time."""
    pp = init_groups(Layout(pp=size), rank, method, timeout_s=0.3).pp
    return _in_vain(pp.is_first, lambda: pp.send(torch.ones(MAIL_BYTES)))


def _in_vain(mine: bool, call: Callable[[], Any]) -> dict[str, Any]:
    """One rank calls in vain, while the other one lives."""
    if not mine:
        os.read(int(os.environ["WAIT_FD"]), 1)
        return {}
    try:
        call()
    except CollectiveError as error:
        os.write(int(os.environ["SIGNAL_FD"]), b"x")
        return {"error": str(error)}
    return {}


class Stop(Exception):
    pass


def signals(rank: int, size: int, method: str) -> dict[str, Any]:
    """A handler that raises ends a wait."""
    pp = pipeline(rank, size, method)
    if rank == 1:
        pp.barrier()
        _until_sleeping(os.getppid(), rank=0)
        os.kill(psutil.Process(os.getppid()).children()[0].pid, signal.SIGTERM)
        os.read(int(os.environ["WAIT_FD"]), 1)
        return {}

    def stop(number: int, frame: Any) -> None:
        os.write(int(os.environ["SIGNAL_FD"]), b"x")
        raise Stop

    signal.signal(signal.SIGTERM, stop)
    pp.barrier()
    try:
        pp.recv_bytes()
    except Stop:
        return {"stopped": True}
    return {}


def misuse(rank: int, size: int, method: str) -> dict[str, Any]:
    """What is refused with a sentence."""
    pp = pipeline(rank, size, method)
    errors = []
    calls: list[Callable[[], Any]] = [
        lambda: pp.send(torch.ones(1), (rank - 1) % size),
        lambda: pp.recv(torch.ones(1), (rank + 1) % size),
        lambda: pp.send(torch.ones(4, 4).T),
        lambda: pp.send_bytes(b"", rank),
    ]
    for call in calls:
        try:
            call()
        except (ValueError, ConfigError) as error:
            errors.append(str(error))
    pp.send(torch.ones(3))
    try:
        pp.recv(torch.ones(4))
    except CollectiveError as error:
        errors.append(str(error))
    pp.barrier()
    return {"errors": errors}


RUNS: list[tuple[Callable[[int, int, str], dict[str, Any]], int]] = [
    (random_messages, 6),
    (types, 2),
    (early, 2),
    (slow, 2),
    (idle, 3),
    (killed, 3),
    (leaver, 2),
    (late, 2),
    (full, 2),
    (signals, 2),
    (misuse, 3),
]


def main(out: Path, *only: str) -> None:
    torch.set_num_threads(1)
    for function, size in RUNS:
        if not only or function.__name__ in only:
            codes = run(function, size, out, start_near_the_wrap)
            (out / f"{function.__name__}-codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
