"""What clients, probes and the machine see when something dies, hangs or is told to end: drumline beside vLLM.

    python bench/faults_vs_vllm.py --vllm /path/to/venv/bin/vllm
    python bench/faults_vs_vllm.py --systems drumline

For each fault and system a fresh server (TP 2, one compute thread a worker, --enforce-eager for vLLM) of the random
Llama of `tiny_llama.py` (or --model), 8 streams, and the fault once every stream has some tokens. Then it watches for
up to --watch seconds: each stream's end or longest pause, every change of /health, what is left of processes, of
/dev/shm and of the temporary folder. After SIGTERM a new request is sent too. The servers of vLLM and drumline are
never there at the same time. Prints a markdown table, a fault a row and each tried once.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tiny_llama
from servers import (
    MODEL_NAME,
    Server,
    about_machine,
    drumline_command,
    ended_by_sigterm,
    free_port,
    vllm_command,
    vllm_env,
)

POLL_S = 0.05
NEW_AT_S = (1.0, 6.0)
"""Seconds after SIGTERM at which new requests come. drumline serves them for 5 s if somebody asks for its health."""


@dataclass(frozen=True)
class Fault:
    """What is done, to whom, with which further flags."""

    name: str
    number: int
    victim: str
    """Part of the process's title; empty: the command itself."""
    flags: tuple[str, ...] = ()
    only_drumline: tuple[str, ...] = ()
    go_on_after_s: float = 0.0
    """When a stopped process is continued."""


def faults(args: argparse.Namespace) -> dict[str, Fault]:
    """By what --faults calls them."""
    stall = ("--stall-timeout", f"{args.stall_timeout:g}")
    return {
        "worker": Fault("kill -9 a worker", signal.SIGKILL, "Worker_TP1"),
        "core": Fault("kill -9 engine core", signal.SIGKILL, "EngineCore"),
        "api": Fault("kill -9 API server", signal.SIGKILL, ""),
        "term": Fault("SIGTERM, defaults", signal.SIGTERM, ""),
        "drain": Fault("SIGTERM, --shutdown-timeout 25", signal.SIGTERM, "", ("--shutdown-timeout", "25")),
        "stop": Fault("SIGSTOP a worker 10 s", signal.SIGSTOP, "Worker_TP1", (), stall, 10.0),
    }


class Stream(threading.Thread):
    """One client: ``times`` of its tokens, and how it ended."""

    def __init__(self, port: int, number: int, tokens: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        prompt = [(number * 977 + place * 131) % 8000 + 100 for place in range(64)]
        self._body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        self.times: list[float] = []
        self.ended = 0.0
        """time.monotonic() of its end; 0: it still waits."""
        self.how = "no end"
        self.start()

    def run(self) -> None:
        try:
            self.how = self._read()
        except (OSError, http.client.HTTPException):
            self.how = "broken"
        self.ended = time.monotonic()

    def _read(self) -> str:
        how = "broken"
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(self._body | {"temperature": 0}), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return f"HTTP {answer.status}"
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.times.append(time.monotonic())
                    if "error" in event:
                        how = "error"
                    elif any(choice["finish_reason"] == "length" for choice in event["choices"]):
                        how = "whole"
        return how

    def pause(self, since: float) -> float:
        """The longest time between two events, of which the later came after ``since``."""
        return max((b - a for a, b in itertools.pairwise(self.times) if b > since), default=0.0)


class Probe(threading.Thread):
    """Asks /health all the time; ``changes`` of what it says, with the time."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._over = threading.Event()
        self.changes: list[tuple[float, str]] = []
        self.start()

    def run(self) -> None:
        while not self._over.wait(POLL_S):
            said = self._ask()
            if not self.changes or self.changes[-1][1] != said:
                self.changes.append((time.monotonic(), said))

    def _ask(self) -> str:
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection:
                connection.request("GET", "/health")
                return str(connection.getresponse().status)
        except TimeoutError:
            return "no answer"
        except (OSError, http.client.HTTPException):
            return "refused"

    def stop(self) -> None:
        self._over.set()
        self.join(10)


@dataclass
class Seen:
    """What came of one fault."""

    fault: str
    system: str
    at: float = 0.0
    """time.monotonic() of the fault."""
    streams: list[Stream] = field(default_factory=list)
    health: list[tuple[float, str]] = field(default_factory=list)
    gone_s: float | None = None
    code: int | None = None
    left: list[str] = field(default_factory=list)
    shm_mb: float = 0.0
    files: int = 0
    new_requests: list[str] = field(default_factory=list)
    watched_s: float = 0.0


def clients_text(seen: Seen) -> str:
    """``8 whole, longest pause 1.2 s``; ``8 error, last at 0.2 s``."""
    texts = []
    for how, count in Counter(stream.how for stream in seen.streams).most_common():
        group = [stream for stream in seen.streams if stream.how == how]
        text = f"{count} {how}"
        if how == "whole":
            text += f", longest pause {max(stream.pause(seen.at) for stream in group):.2f} s"
        elif how == "no end":
            text += f" within {seen.watched_s:.0f} s"
        else:
            text += f", last at {max(stream.ended for stream in group) - seen.at:.2f} s"
        texts.append(text)
    if seen.new_requests:
        texts.append(f"a new request {', '.join(seen.new_requests)}")
    return "; ".join(texts)


def health_text(seen: Seen) -> str:
    """``503 at 0.2 s, 200 at 2.3 s``."""
    changes = [(at, said) for at, said in seen.health if at > seen.at]
    return ", ".join(f"{said} at {at - seen.at:.2f} s" for at, said in changes) or "200 throughout"


def rest_text(seen: Seen) -> str:
    """Processes, exit code, what lies about."""
    if seen.gone_s is not None:
        text = f"all gone at {seen.gone_s:.1f} s, exit code {seen.code}"
    elif seen.code is None:
        text = "it goes on"
    else:
        text = f"exit code {seen.code}; at {seen.watched_s:.0f} s still there: {', '.join(seen.left)}"
    if seen.gone_s is not None or seen.code is not None:
        text += f"; {seen.shm_mb:.0f} MB of /dev/shm left" if seen.shm_mb else ""
        text += f"; {seen.files} temporary files left" if seen.files else ""
    return text


def title(process: psutil.Process) -> str:
    """What it calls itself."""
    with contextlib.suppress(psutil.Error):
        command = process.cmdline()
        if "resource_tracker" in " ".join(command):
            return "resource tracker"
        return command[0] if command and "::" in command[0] else process.name()
    return ""


def wait_until(what: Callable[[], Any], limit_s: float) -> bool:
    """Poll; False after the limit."""
    deadline = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def new_request(port: int) -> str:
    """A request that comes while the server ends."""
    body = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return "refused" if isinstance(error, ConnectionRefusedError) else type(error).__name__
    tokens = (found.get("usage") or {}).get("completion_tokens")
    return f"HTTP {answer.status}" + (f", {tokens} tokens" if answer.status == 200 else "")


class Trial:
    """One server, one fault."""

    def __init__(self, system: str, fault: Fault, args: argparse.Namespace, log: Path) -> None:
        self.fault, self.args = fault, args
        self.port = free_port()
        self.seen = Seen(fault.name, system)
        if system == "vllm":
            command = vllm_command(args.vllm, args.model, args.tp, "float32", self.port, *fault.flags)
            env = vllm_env(args.vllm, args.kv_mib)
        else:
            more = (*fault.flags, *fault.only_drumline)
            command, env = drumline_command(args.model, args.tp, "float32", self.port, args.kv_mib, *more), {}
        self.server = Server(system, command, env, self.port, log)

    def run(self) -> Seen:
        with self.server as server:
            said = server.wait_ready(600)
            print(f"{server.name}, {self.fault.name}: ready after {said:.1f} s", file=sys.stderr, flush=True)
            self._streams(8, wait=True)  # the warm-up
            self._strike()
            self._watch()
        return self.seen

    def _streams(self, tokens: int, *, wait: bool = False) -> list[Stream]:
        streams = [Stream(self.port, number, tokens) for number in range(self.args.streams)]
        for stream in streams if wait else ():
            stream.join(300)
        return streams

    def _strike(self) -> None:
        seen, fault = self.seen, self.fault
        seen.streams = self._streams(self.args.tokens)
        if not wait_until(lambda: min(len(one.times) for one in seen.streams) >= self.args.after, 300):
            raise SystemExit(f"streams do not get tokens: see {self.server.log}")
        self.server.note_shared_memory()
        self.probe = Probe(self.port)
        wait_until(lambda: self.probe.changes, 10)
        victim = self._victim()
        seen.at = time.monotonic()
        os.kill(victim, fault.number)
        if fault.number == signal.SIGTERM:
            threading.Thread(target=self._ask_later, daemon=True).start()
        if fault.go_on_after_s:
            threading.Timer(fault.go_on_after_s, self._continue, (victim,)).start()

    def _victim(self) -> int:
        if not self.fault.victim:
            return self.server.process.pid
        return next(one.pid for one in self.server._session() if self.fault.victim in title(one))

    def _continue(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was found to hang, and another one is in its place
            os.kill(pid, signal.SIGCONT)

    def _ask_later(self) -> None:
        """In the lag for load balancers and after it."""
        for at in NEW_AT_S:
            time.sleep(max(0.0, self.seen.at + at - time.monotonic()))
            self.seen.new_requests.append(f"at {at:g} s: {new_request(self.port)}")

    def _watch(self) -> None:
        seen, server = self.seen, self.server
        survives = seen.at + max(self.fault.go_on_after_s + 2.0, 5.0)

        def over() -> bool:
            if server.process.poll() is not None and not server._session():
                return True
            settled = (
                self.fault.number != signal.SIGTERM
                and all(stream.ended for stream in seen.streams)
                and self.probe.changes[-1][1] == "200"
            )
            return settled and time.monotonic() > survives

        wait_until(over, self.args.watch)
        seen.watched_s = time.monotonic() - seen.at
        seen.code = server.process.poll()
        left = server._session()
        seen.left = sorted({title(one) for one in left})
        if seen.code is not None and not left:
            seen.gone_s = seen.watched_s
        self.probe.stop()
        seen.health = self.probe.changes
        with contextlib.suppress(FileNotFoundError):
            seen.files = sum(1 for _ in server._folder.iterdir())
        there = [path for path in server._shared if path.exists()]
        seen.shm_mb = sum(path.stat().st_size for path in there) / 1e6
        for stream in seen.streams:
            stream.join(1.0)


def table(rows: Sequence[Seen]) -> str:
    """Markdown."""
    lines = ["| fault | system | clients | /health | processes and what is left |", "|" + " --- |" * 5]
    for seen in rows:
        lines.append(
            f"| {seen.fault} | {seen.system} | {clients_text(seen)} | {health_text(seen)} | {rest_text(seen)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="path of the vllm command")
    parser.add_argument("--systems", nargs="+", choices=["drumline", "vllm"], default=["vllm", "drumline"])
    parser.add_argument("--faults", nargs="+", choices=["worker", "core", "api", "term", "drain", "stop"])
    parser.add_argument("--model", help="folder; none: a random Llama of 5.0 M parameters")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a stream")
    parser.add_argument("--after", type=int, default=16, help="tokens of each stream before the fault")
    parser.add_argument("--watch", type=float, default=35.0, help="seconds after the fault")
    parser.add_argument("--stall-timeout", type=float, default=12.0, help="of drumline, for the stopped worker")
    parser.add_argument("--kv-mib", type=int, default=1024)
    args = parser.parse_args()
    if "vllm" in args.systems and not args.vllm:
        parser.error("--vllm /path/to/bin/vllm, or --systems drumline")
    print(about_machine(), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="drumline-faults-"))
    args.model = args.model or str(tiny_llama.make(folder / "model"))
    known, rows = faults(args), []
    with ended_by_sigterm():
        for name in args.faults or known:
            for system in args.systems:
                rows.append(Trial(system, known[name], args, folder / f"{system}-{name}.log").run())
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
