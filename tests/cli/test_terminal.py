"""``drumline chat`` at a terminal: a process of its own on a pseudo-terminal, with real key strokes."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from drumline.text.tokenizer import Tokenizer
from tests.server.peer import Served, served
from tests.text.vocab import byte_level_folder

CTRL_C, CTRL_D = b"\x03", b"\x04"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(byte_level_folder(tmp_path)) as running:
        yield running


class Terminal:
    """What a person at the keyboard does and sees."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    async def until(self, text: str) -> str:
        """What was shown since the last call, up to ``text``."""
        wanted = text.encode()
        async with asyncio.timeout(20):
            while wanted not in self._seen:
                self._seen += await self._read()
        shown, _, self._seen = self._seen.partition(wanted)
        return (shown + wanted).decode()

    async def _read(self) -> bytes:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._fd, readable.set)
        try:
            await readable.wait()
            return os.read(self._fd, 4096)
        finally:
            loop.remove_reader(self._fd)


async def test_a_person_at_a_terminal(server: Served, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tmp_path)
    words = tokenizer.encode("The lazy dog ")
    server.engine.script = lambda request: [*words, tokenizer.eos_token_ids[0]]
    server.engine.pause_s = 0.01
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "drumline.cli.main", "chat", "--url", server.url]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(slave)
    try:
        terminal = Terminal(master)
        await terminal.until("> ")
        terminal.type(b"hello\n")
        assert "The lazy dog" in await terminal.until("tokens/s]")
        await terminal.until("> ")
        server.engine.script = lambda request: words  # has no end
        terminal.type(b"again\n")
        await terminal.until("dog The")
        terminal.type(CTRL_C)
        await terminal.until("[stopped]")
        await server.engine.until(0)
        await terminal.until("> ")
        terminal.type(b"half a line" + CTRL_C)
        await terminal.until("> ")
        terminal.type(CTRL_D)
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)
    seen = [tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False) for r in server.engine.seen]
    assert len(seen) == 2
    assert "hello<|im_end|>\n<|im_start|>assistant\nThe lazy dog" in seen[1]


def _take_terminal() -> None:
    """Ctrl-C goes to the process whose terminal it is."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
