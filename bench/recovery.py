"""Pause and outcome when processes of `drumline serve` are killed under streams.

    python bench/recovery.py                                # the embedded default model, TP 2, 16 streams
    python bench/recovery.py FOLDER --tp 1 --streams 32 --victims Worker_TP0 EngineCore_DP0

For each victim: a server, an undisturbed run of the streams, and the same again with a kill -9 after --after tokens
of each. Half of the streams are greedy, half seeded with a frequency penalty. Prints a markdown table: streams that did
not end well; texts that are not those of the undisturbed run (a tie may fall the other way in other batches); the
longest gap between two events of a stream (the first to go on, the median, the last; undisturbed: the longest of all);
where the time went, as the server's log has it; and the CPU seconds that it took until all streams went on, which tell
what the pause would be on cores that nobody else keeps busy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from servers import MODEL_NAME, Server, about_machine, drumline_command, ended_by_sigterm, free_port, tree

LIMIT_S = 300.0
OLD_TOKENS_S = 0.3
"""After the kill, tokens of the old engine may still come; the new one takes longer than this."""
RESTARTED = re.compile(r"was started again in ([\d.]+) s \(([^)]*)\): .*?, (\d+) tokens")
PHASES = (
    "old processes gone",
    "fork server",
    "imports",
    "engine core",
    "workers",
    "groups",
    "model",
    "KV cache",
    "warm-up",
    "first token",
)


class Stream(threading.Thread):
    """One client; ``times`` of its events, ``tokens`` it got, ``text``."""

    def __init__(self, port: int, number: int, args: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self._port = port
        prompt = [(number * 977 + place * 131) % 40_000 + 100 for place in range(args.prompt)]
        self._body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.0,
        }
        if number % 2:
            self._body |= {"temperature": 1.0, "seed": number, "frequency_penalty": 0.3}
        self.times: list[float] = []
        self.text = ""
        self.ended = False
        self.error = ""
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            connection.close()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", []):
            self.times.append(time.monotonic())
            self.text += choice["text"]
            self.ended = self.ended or choice["finish_reason"] is not None

    def gap(self, since: float = 0.0) -> float:
        """The longest time between two events, of which the later came after ``since``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if later > since), default=0.0)


class Kill:
    """A process to kill, and what the server's tree (``root``) computes until all streams have gone on."""

    def __init__(self, root: int, victim: int) -> None:
        self._root, self._victim = root, victim
        self.at = 0.0
        """time.monotonic()."""
        self.cpu_s = 0.0
        """CPU seconds of the tree from the kill until each stream had a token of the new engine."""

    def now(self) -> None:
        self._before = {process.pid: cpu_seconds_of(process) for process in tree(self._root)}
        self.at = time.monotonic()
        os.kill(self._victim, signal.SIGKILL)

    def look(self, streams: list[Stream]) -> None:
        if self.at and not self.cpu_s and all(stream.times[-1] > self.at + OLD_TOKENS_S for stream in streams):
            after = {process.pid: cpu_seconds_of(process) for process in tree(self._root)}
            self.cpu_s = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())


def cpu_seconds_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def run(port: int, args: argparse.Namespace, kill: Kill | None = None) -> list[Stream]:
    """All streams to their ends."""
    streams = [Stream(port, number, args) for number in range(args.streams)]
    deadline = time.monotonic() + LIMIT_S
    while any(stream.is_alive() for stream in streams):
        if kill and not kill.at and min(len(stream.times) for stream in streams) >= args.after:
            kill.now()
        if kill:
            kill.look(streams)
        if time.monotonic() > deadline:
            raise SystemExit(f"streams have not ended after {LIMIT_S:g} s")
        time.sleep(0.01)
    return streams


def pid_of(port: int, name: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/startupz")
    rows = json.loads(connection.getresponse().read())["processes"]
    connection.close()
    return int(next(row["pid"] for row in rows if row["name"] == name))


def measure(victim: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    port = free_port()
    log = folder / f"{victim}.log"
    command = drumline_command(args.model, args.tp, "float32", port, args.kv_mib)
    if not args.model:
        command.remove("")
    with Server(f"drumline {victim}", command, {}, port, log) as server:
        server.wait_ready()
        run(port, args)  # memory is touched, caches are warm
        plain = run(port, args)
        kill = Kill(server.process.pid, pid_of(port, victim))
        again = run(port, args, kill)
        found = RESTARTED.search(log.read_text(errors="replace"))
        if found is None:
            raise SystemExit(f"no restart: see {log}")
    gaps = sorted(stream.gap(kill.at) for stream in again)
    phases = dict(re.findall(r"([A-Za-z][\w ,-]*?) ([\d.]+)(?:, |$)", found[2]))
    return {
        "victim": victim,
        "lost": sum(not stream.ended or bool(stream.error) for stream in again),
        "differ": sum(one.text != other.text for one, other in zip(plain, again, strict=True)),
        "plain gap": max(stream.gap() for stream in plain),
        "first": gaps[0],
        "median": statistics.median(gaps),
        "last": gaps[-1],
        "cpu_s": kill.cpu_s,
        "tokens": int(found[3]),
        "phases": {name: float(seconds) for name, seconds in phases.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="folder; none: the embedded default model")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a stream")
    parser.add_argument("--after", type=int, default=32, help="tokens of each stream before the kill")
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--victims", nargs="+", default=["Worker_TP1", "EngineCore_DP0", "ForkServer"])
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args()
    print(about_machine())
    folder = Path(tempfile.mkdtemp(prefix="drumline-recovery-"))
    rows = []
    with ended_by_sigterm():
        for victim in args.victims:
            rows.append(measure(victim, args, folder))
            print(rows[-1], flush=True)
    shutil.rmtree(folder)
    names = ["killed", "lost", "texts that differ", "longest gap undisturbed", "pause: first", "median", "last"]
    names += [*PHASES, "tokens computed again", "CPU s"]
    print(f"\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows:
        gaps = [f"{row[key]:.2f}" for key in ("plain gap", "first", "median", "last")]
        phases = [f"{row['phases'][name]:.2f}" if name in row["phases"] else "" for name in PHASES]
        cells = [row["victim"], row["lost"], row["differ"], *gaps, *phases, row["tokens"], f"{row['cpu_s']:.1f}"]
        print(f"| {' | '.join(map(str, cells))} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
