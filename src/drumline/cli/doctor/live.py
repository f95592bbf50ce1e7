"""``drumline doctor --live``: what the processes of a running server are doing, with the stacks of all threads.

The server makes the report (``GET /debug/report``) and goes on. Where it does not answer, /proc tells what there is to
see of its processes from outside, and SIGUSR1 to the API server is the way that needs no network.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil

from drumline.cli.client import Client, ServerError
from drumline.config import ServerConfig
from drumline.errors import ConfigError, ExitCode
from drumline.processes.live import LiveReport, look_at
from drumline.server.sockets import join, listeners

TITLE = "drumline::"
ANSWER_S = 8.0
"""A server that works makes its report in less, also where its engine does not answer it."""


def main(namespace: argparse.Namespace) -> int:
    """Print the report. Exit code 0 if nobody is odd, 5 if somebody is, 3 if there is no server."""
    keys = getattr(namespace, "server.api_key") or [os.environ.get("DRUMLINE_API_KEY", "")]
    tree: list[psutil.Process] = []
    try:
        if namespace.pid:
            tree = tree_of(namespace.pid)
            address = address_of(tree)
        else:
            address = namespace.url or os.environ.get("DRUMLINE_URL") or _default(namespace)
        report = ask(address, keys[0])
    except ServerError as error:
        if not tree:
            print(f"drumline doctor: error: {error}", file=sys.stderr)
            return ExitCode.START_FAILED
        report = from_outside(tree, str(error))
    sys.stdout.write(
        (msgspec.json.format(msgspec.json.encode(report)).decode() + "\n") if namespace.json else report.text()
    )
    return ExitCode.STALLED if report.odd else ExitCode.OK


def ask(address: str, key: str) -> LiveReport:
    """The server's own report. ServerError if there is none."""
    answer: Any = Client(address, key, ANSWER_S).get("/debug/report")
    if "error" in answer:
        raise ServerError(answer["error"]["message"])
    try:
        return msgspec.convert(answer, LiveReport)
    except msgspec.ValidationError as error:
        raise ServerError(f"{address} is no drumline server, or of another version: {error}") from None


def tree_of(pid: int) -> list[psutil.Process]:
    """All processes of the server that this one belongs to, its root first. ConfigError if it is none of a server's."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.parents()]
        ours = [one for one in family if _is_ours(one)]
        if not ours:
            raise ConfigError(f"--pid {pid}: not a process of drumline ({' '.join(process.cmdline())[:80]})")
        return [ours[-1], *ours[-1].children(recursive=True)]
    except (psutil.Error, ValueError, OverflowError) as error:
        raise ConfigError(f"--pid {pid}: {error}") from None


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any(TITLE in part for part in process.cmdline()[:1])
    except psutil.Error:
        return False


def address_of(tree: Sequence[psutil.Process]) -> str:
    """URL of the port that its root listens on. ServerError if it has none."""
    found = listeners([("root", tree[0].pid)])
    if not found:
        raise ServerError(f"pid {tree[0].pid} listens on no port")
    return f"http://{found[0].address.replace('0.0.0.0:', '127.0.0.1:').replace('[::]:', '[::1]:')}"


def from_outside(tree: Sequence[psutil.Process], why: str) -> LiveReport:
    """What /proc tells, without stacks."""
    report = LiveReport(
        cause="asked for by drumline doctor", processes=[], remarks=[f"the server does not answer: {why}"]
    )
    for process in tree:
        try:
            name = process.cmdline()[0].removeprefix(TITLE) if _is_ours(process) else process.name()
        except (psutil.Error, IndexError):
            continue
        found = look_at(name, process.pid)
        found.stacks = "(from outside there are none: send SIGUSR1 to the API server)"
        report.processes.append(found)
        if found.state == "T":
            report.remarks.append(f"{name} (pid {process.pid}) is stopped (T)")
    return report


def _default(namespace: argparse.Namespace) -> str:
    server = ServerConfig()
    where = getattr(namespace, "server.host") or server.host
    port = getattr(namespace, "server.port") or server.port
    return f"http://{join(where, port)}"
