"""Ctrl-C while ``drumline serve`` and ``drumline chat`` start: exit code 130, not a word too many, nothing left behind.

It goes to the whole process group, as a terminal sends it. What comes after the start is tried in tests/chaos.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from drumline.errors import ExitCode
from tests.server.command import FLAGS, tiny_folder, wait_for

LIMIT_S = 5.0
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""For an interpreter without site-packages of its own."""


class Command:
    """One run in a process group of its own."""

    def __init__(self, *command: str, env: dict[str, str] | None = None, stdin: int = subprocess.DEVNULL) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=stdin,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )

    @property
    def text(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def says(self, words: str) -> None:
        def said() -> bool:
            assert words in self.text or self.process.poll() is None, self.text
            return words in self.text

        wait_for(said, 60, f"{words}\n{self.text}")

    def members(self) -> list[int]:
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(pid) == self.process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def interrupt(self) -> None:
        """Ctrl-C, and what must follow."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.ends()

    def ends(self) -> None:
        began = time.monotonic()
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on\n{self.text}") from None
        assert code == ExitCode.INTERRUPTED, self.text
        wait_for(lambda: not self.members(), LIMIT_S - (time.monotonic() - began), "end of all processes")
        for word in ("Traceback", "Error", "Exception", "drumline failed", "Warning"):
            assert word not in self.text, self.text

    def close(self) -> None:
        for pid in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.process.wait(10)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._log.close()


@pytest.fixture
def run() -> Iterator[Callable[..., Command]]:
    runs: list[Command] = []

    def start(*command: str, **options: object) -> Command:
        runs.append(Command(*command, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for one in runs:
        one.close()


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """Somebody who listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def url(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


AT_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.killpg(0, signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from drumline.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "name",
    ["drumline.config", "drumline.server.run", "uvloop", "drumline.server.models", "drumline.engine.client", "logging"],
)
def test_serve_while_it_imports(run: Callable[..., Command], tmp_path: Path, name: str) -> None:
    """Before its signals are taken care of, before there is a loop, and when there is one."""
    run("-c", AT_IMPORT.format(name=name), "serve", str(tiny_folder(tmp_path)), *FLAGS).ends()


@pytest.mark.parametrize("name", ["drumline.cli.chat", "drumline.cli.client", "http.client"])
def test_chat_while_it_imports(run: Callable[..., Command], name: str) -> None:
    run("-c", AT_IMPORT.format(name=name), "chat", "--url", "http://127.0.0.1:1").ends()


def test_next_to_nothing_is_imported_before_it_is_taken_care_of() -> None:
    """Until then ctrl-C is a traceback, so each millisecond counts (``typing`` alone is 20 on a slow core)."""
    code = "import sys; import drumline.cli.main; print(*sys.modules)"
    got = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=ENV)
    there = set(got.stdout.split())
    assert "signal" in there
    assert not there & {"typing", "re", "importlib", "drumline.errors", "argparse", "logging"}


@pytest.fixture
def serve(run: Callable[..., Command], tmp_path: Path) -> Callable[..., Command]:
    def start(*arguments: str, **env: str) -> Command:
        return run(
            "-m", "drumline", "serve", *arguments, *FLAGS, env={"XDG_CACHE_HOME": str(tmp_path / "cache"), **env}
        )

    return start


def test_serve_while_a_hub_does_not_answer(serve: Callable[..., Command], deaf: socket.socket) -> None:
    command = serve("somebody/some-model", HF_ENDPOINT=url(deaf), HF_HUB_OFFLINE="0")
    with deaf.accept()[0]:
        command.interrupt()


def test_serve_while_the_default_model_is_fetched(
    serve: Callable[..., Command], deaf: socket.socket, tmp_path: Path
) -> None:
    index = f"{url(deaf)}/simple"
    command = serve(PIP_INDEX_URL=index, PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    with deaf.accept()[0]:
        command.interrupt()
    assert not list((tmp_path / "cache").rglob(".partial-*"))


def test_serve_while_the_default_model_is_checked(serve: Callable[..., Command], tmp_path: Path) -> None:
    large = tmp_path / "large.gguf"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # takes an hour to check, and no room
    command = serve(DRUMLINE_DEFAULT_GGUF=str(large))
    command.says("checking the download")
    command.interrupt()
    wait_for(lambda: not list((tmp_path / "cache").rglob(".partial-*")), LIMIT_S, "removal of what was begun")


def test_serve_while_a_file_does_not_come(serve: Callable[..., Command], tmp_path: Path) -> None:
    """As from a file system that is gone."""
    folder = tiny_folder(tmp_path / "model")
    os.mkfifo(folder / "generation_config.json")
    command = serve(str(folder))
    command.says("ForkServer: ")
    command.interrupt()


BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
os.execv(sys.executable, [sys.executable, "-m", "drumline", *sys.argv[1:]])
"""


def test_serve_by_somebody_who_blocks_signals(run: Callable[..., Command], tmp_path: Path) -> None:
    command = run("-c", BLOCKED, "serve", str(tiny_folder(tmp_path)), *FLAGS)
    command.says("listens on")
    command.interrupt()


@pytest.mark.parametrize("words", ["ForkServer: imports", "EngineCore_DP0: ", "Worker_TP0: "])
def test_serve_while_its_processes_start(serve: Callable[..., Command], tmp_path: Path, words: str) -> None:
    command = serve(str(tiny_folder(tmp_path / "model")))
    command.says(words)
    command.interrupt()


@pytest.mark.parametrize(
    ("size", "moment"), [("2", "load_model"), pytest.param("1", "compile_or_warm_up_model", marks=pytest.mark.chaos)]
)
def test_serve_while_workers_are_at_it(serve: Callable[..., Command], tmp_path: Path, size: str, moment: str) -> None:
    """With one worker, it is in the engine core's own process."""
    os.mkfifo(tmp_path / "fifo")
    held = {"CHAOS_HOLD": moment, "CHAOS_FIFO": str(tmp_path / "fifo")}
    folder = str(tiny_folder(tmp_path / "model"))
    command = serve(folder, "--worker-cls", "tests.chaos.workers:Held", "-tp", size, **held)
    command.says(f"held in {moment}")
    command.interrupt()


@pytest.mark.chaos
def test_serve_while_kernels_are_compiled(serve: Callable[..., Command], tmp_path: Path) -> None:
    """The first start on a machine: C code that has the interpreter's lock for long."""
    kernels = tmp_path / "kernels"
    command = serve(str(tiny_folder(tmp_path / "model")), NUMBA_CACHE_DIR=str(kernels))
    wait_for(lambda: list(kernels.rglob("*.nbi")), 100, "first kernel of several")
    command.interrupt()


@pytest.mark.chaos
@pytest.mark.parametrize("tenths", range(2, 42, 2))
def test_serve_at_any_moment(serve: Callable[..., Command], tmp_path: Path, tenths: int) -> None:
    """But for the first 50 ms, which are the interpreter's own."""
    command = serve(str(tiny_folder(tmp_path)))
    time.sleep(tenths / 10)
    command.interrupt()


# ---------------------------------------------------------------------------------------------------------------- chat


def test_chat_while_nobody_accepts(run: Callable[..., Command]) -> None:
    with socket.socket() as listening, contextlib.ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(3):  # the kernel takes no more
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        command = run("-m", "drumline", "chat", url(listening), "-m", "x")
        connecting = f"127.0.0.1:{listening.getsockname()[1]}"
        wait_for(lambda: _connects(command.process.pid, connecting), 20, "attempt to connect")
        command.interrupt()


def _connects(pid: int, to: str) -> bool:
    return any(
        c.status == psutil.CONN_SYN_SENT and c.raddr and f"{c.raddr.ip}:{c.raddr.port}" == to
        for c in psutil.Process(pid).net_connections("tcp")
    )


NO_NAMES = """
import ctypes, socket, sys
libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)
def look_up(*arguments, **options):
    print("looking up", flush=True)
    while True:
        libc.pthread_mutex_lock(lock)  # the second time it waits, whatever signals come, as a resolver does
socket.getaddrinfo = look_up
from drumline.cli.main import main
sys.exit(main())
"""


def test_chat_while_a_name_is_looked_up(run: Callable[..., Command]) -> None:
    command = run("-c", NO_NAMES, "chat", "http://some.host:8000", "-m", "x")
    command.says("looking up")
    command.interrupt()


def test_chat_while_the_server_says_nothing(run: Callable[..., Command], deaf: socket.socket) -> None:
    command = run("-m", "drumline", "chat", url(deaf), "-m", "x")
    with deaf.accept()[0] as connection:
        assert connection.recv(4096).startswith(b"GET /v1/models")
        command.interrupt()


def _serve_models(listening: socket.socket) -> None:
    body = b'{"data": [{"id": "tiny"}]}'
    with listening.accept()[0] as connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


def test_chat_while_it_reads_a_pipe(run: Callable[..., Command], deaf: socket.socket) -> None:
    command = run("-m", "drumline", "chat", url(deaf), stdin=subprocess.PIPE)
    _serve_models(deaf)
    pipe = Path(f"/proc/{command.process.pid}/syscall")
    wait_for(lambda: pipe.read_text().startswith(("0 0x0 ", "63 0x0 ")), 20, "read of standard input")
    command.interrupt()


def test_chat_while_it_waits_for_the_first_token(run: Callable[..., Command], deaf: socket.socket) -> None:
    command = run("-m", "drumline", "chat", url(deaf), "-m", "x")
    _serve_models(deaf)
    with deaf.accept()[0] as connection:
        assert connection.recv(4096).startswith(b"POST /v1/chat/completions")
        command.interrupt()
