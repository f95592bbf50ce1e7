from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import uvloop
from openai import AsyncOpenAI

from tests.text.vocab import byte_level_folder

from .peer import Served, served

# libuv makes a pipe for signals with its first loop and keeps it as long as the process lives.
uvloop.new_event_loop().close()


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the command has: it closes half-closed connections in its own way."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("served"))


@pytest_asyncio.fixture
async def server(folder: Path) -> AsyncIterator[Served]:
    async with served(folder) as running:
        yield running


@pytest_asyncio.fixture
async def web(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        yield client


@pytest_asyncio.fixture
async def openai(server: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
