"""What child processes of the tests run."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drumline.errors import ExecutorFailedError, FailedError
from drumline.processes import ChildContext, EventKind, MemberEvent, ProcessSpec, Supervisor

TARGETS = __name__
DEADLINE_S = 60.0


def serve(context: ChildContext, payload: bytes) -> None:
    """Ready, then echo until stopped."""
    context.listen(lambda data: context.send(b"echo " + data))
    context.ready(b"info of " + payload)
    context.wait_stop(DEADLINE_S)


def describe(context: ChildContext, payload: bytes) -> None:
    """Say what the process looks like from inside."""
    names = json.loads(payload) if payload else []
    fds = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            fds[int(link.name)] = str(link.readlink())
        except OSError:
            pass
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "env": {name: os.environ.get(name) for name in names},
        "cpus": sorted(os.sched_getaffinity(0)),
        "fds": fds,
        "given": context.fds,
        "conn": context.conn.fd,
        "title": Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip(),
        "modules": [name for name in ("torch", "numpy") if name in sys.modules],
        "torch_threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
        "path": sys.path,
        "main": getattr(sys.modules["__main__"], "__file__", ""),
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    }
    context.ready(json.dumps(facts).encode())
    context.wait_stop(DEADLINE_S)


class OddError(Exception):
    """Cannot be pickled, needs three arguments, and its text cannot be made."""

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__(a)
        self.handle = lambda: (a, b, c)

    def __str__(self) -> str:
        raise RuntimeError("no text")


def break_in(context: ChildContext, payload: bytes) -> None:
    """Break in the way that payload says, after phase ``load_model``; ``late-``: after ready."""
    context.set_phase("load_model")
    how = payload.decode()
    if how.startswith("late-"):
        context.ready()
        how = how.removeprefix("late-")
    if how == "raise":
        raise ValueError("boom in a child")
    if how == "odd":
        raise OddError(1, 2, 3)
    if how == "exit3":
        os._exit(3)
    if how == "sysexit":
        sys.exit(5)
    if how == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        print("last words before the segfault")
        ctypes.string_at(0)
    if how == "return":
        return
    if how == "close":
        context.conn._sock.shutdown(socket.SHUT_WR)
    context.wait_stop(DEADLINE_S)


def late_twin(context: ChildContext, payload: bytes) -> None:
    """Fail some milliseconds after the owner's word."""
    words: queue.Queue[bytes] = queue.Queue()
    context.listen(words.put)
    context.ready()
    time.sleep(int(words.get(timeout=DEADLINE_S)) / 1000)
    raise RuntimeError(f"failure of {context.role}")


def block(context: ChildContext, payload: bytes) -> None:
    """Never be ready: in a sleep that Python can interrupt, or in C code that holds the GIL."""
    context.set_phase("load_model")
    try:
        context.send(b"loading")
        if payload == b"gil":
            ctypes.PyDLL(None).sleep(1000)
        time.sleep(DEADLINE_S)
    finally:
        Path(context.log_file).with_suffix(".ended").touch()


def clean_up(context: ChildContext, payload: bytes) -> None:
    """Clean up before it was ever ready."""
    context.begin_clean_up()
    context.send(b"cleaning up")
    time.sleep(0.5)
    Path(context.log_file).with_suffix(".ended").touch()


def progress(context: ChildContext, payload: bytes) -> None:
    """Progress every 50 ms as often as payload says; then ready if told, else stuck."""
    count, _, then = payload.decode().partition(" ")
    for i in range(int(count)):
        context.set_phase(f"load_model {i}")
        time.sleep(0.05)
    if then == "ready":
        context.ready()
    context.wait_stop(DEADLINE_S)


def words(context: ChildContext, payload: bytes) -> None:
    """Tell the owner every 50 ms, as often as payload says, how those get on that it waits for; then ready."""
    for _ in range(int(payload)):
        context.send(b"they get on")
        time.sleep(0.05)
    context.ready()
    context.wait_stop(DEADLINE_S)


def stubborn(context: ChildContext, payload: bytes) -> None:
    """Does not end however it is asked."""
    context.ready()
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        time.sleep(0.2)


def chatty(context: ChildContext, payload: bytes) -> None:
    """Many lines, from Python and from C, with a change of name in between."""
    number = payload.decode()
    for i in range(200):
        print(f"line {i} of {number} " + "x" * 200)
    context.set_name(f"Worker_TP{number}")
    os.write(1, b"raw words of C code\n")
    print("unfinished", end="")
    context.ready()
    context.wait_stop(DEADLINE_S)


def with_grandchild(context: ChildContext, payload: bytes) -> None:
    """Start a process of its own that outlives it."""
    process = subprocess.Popen(["sleep", "60"])
    context.ready(str(process.pid).encode())
    context.wait_stop(DEADLINE_S)
    os._exit(0)


def with_descendants(context: ChildContext, payload: bytes) -> None:
    """Start a process that starts one that starts one."""
    subprocess.Popen(["sh", "-c", "sh -c 'sleep 60; true'; true"])
    context.ready()
    context.wait_stop(DEADLINE_S)
    os._exit(0)


def core(context: ChildContext, payload: bytes) -> None:
    """A middle owner: makes two workers, tells their pids, and passes failures on."""
    options: dict[str, Any] = json.loads(payload)
    failures: queue.Queue[MemberEvent | None] = queue.Queue()

    def on_event(event: MemberEvent) -> None:
        if event.kind is EventKind.FAILURE:
            failures.put(event)
        elif event.kind is EventKind.PHASE and event.member is not None:
            context.set_phase(f"{event.member.role}: {event.phase}")

    supervisor = Supervisor(context.forkserver, on_event, rung_s=0.5)
    context.on_stop(lambda: failures.put(None))
    members = []
    for rank in range(2):
        spec = ProcessSpec(role=f"Worker_{rank}", target=f"{TARGETS}:{options['worker']}", rank=rank, payload=b"")
        members.append(context.forkserver.spawn(spec))
        supervisor.add(members[-1])
    try:
        supervisor.wait_all_ready(members, 30)
        context.ready(json.dumps([member.pid for member in members]).encode())
        event = failures.get(timeout=DEADLINE_S)
        if event is not None and event.report is not None:
            raise ExecutorFailedError(event.report)
    except FailedError as error:
        context.fail(error)
        supervisor.close(force=True)
        raise
    finally:
        supervisor.close()


def hang_in_c(context: ChildContext, payload: bytes) -> None:
    """As block, in C code that holds the GIL."""
    block(context, b"gil")
