"""Memory that outlives an engine: who may use it, when, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config import CacheConfig, EngineConfig
from drumline.engine.healing import Healing, Restarting
from drumline.engine.kept import KeptMemory, KeptPrefixes, fingerprint, ranks_to_keep
from drumline.engine.prefix_table import PrefixTable
from drumline.engine.protocol import Abort, EngineRequest, EngineStats, RequestOutput
from drumline.engine.recovery import Limits
from drumline.errors import FailureReport
from drumline.executor.mp import MultiprocExecutor
from drumline.model.attention import KVCache
from drumline.plan.kv import KVSpec

from .processes import Engine, config_for, engine, greedy, kill, prompt

LIMITS = Limits(restarts=5, window_s=600.0, backoff_s=0.01)
SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4, bytes_per_block=512)
BLOCKS = 10
A = b"a" * 32


def cache(fd: int, blocks: int = BLOCKS) -> KVCache:
    return KVCache(
        num_layers=2,
        num_blocks=blocks,
        num_kv_heads=1,
        block_size=4,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        memory_fd=fd,
    )


@contextmanager
def kept(ranks: int = 1) -> Iterator[KeptMemory]:
    memory = KeptMemory(ranks)
    try:
        yield memory
    finally:
        memory.close()


def open_memfds() -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += "memfd:drumline-" in str(link.readlink())
        except OSError:
            continue
    return count


# The memory.


def test_a_cache_finds_what_another_one_left_if_it_has_its_size():
    with kept() as memory:
        fd = memory.hand_over()[2]
        first = cache(fd)
        first.data[1, 0, 3] = 7.0
        del first
        second = cache(fd)
        assert second.data[1, 0, 3].eq(7.0).all()
        assert second.data.sum() == 7.0 * 4 * 8
        del second
        other = cache(fd, BLOCKS + 1)
        assert not other.data.any()
        assert os.fstat(fd).st_size == other.data.nbytes
        while other.touch_ahead():
            pass
        assert not other.data.any()


def test_without_a_memory_file_of_that_size_a_cache_has_its_own_memory(monkeypatch: pytest.MonkeyPatch):
    """A limit on the size of files holds for memory files too."""

    def refuse(fd: int, size: int) -> None:
        if size:
            raise OSError(27, "File too large")
        truncate(fd, size)

    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", refuse)
    with kept() as memory:
        fd = memory.hand_over()[2]
        own = cache(fd)
        own.data[0] = 1.0
        assert os.fstat(fd).st_size == 0


def test_memory_is_free_when_the_last_process_that_holds_it_is_gone():
    with kept() as memory:
        assert memory.is_free(0.0)
        life = memory.hand_over()[1]
        go, gone = os.pipe()
        pid = os.fork()
        if not pid:  # an engine: it has what it was handed
            os.close(gone)
            os.read(go, 1)
            os._exit(0)
        os.close(go)
        assert os.fstat(life)
        memory.handed_over()
        try:
            assert not memory.is_free(0.0)
            kill(pid, signal.SIGKILL)
            assert memory.is_free(5.0)
        finally:
            os.close(gone)
            os.waitpid(pid, 0)
    memory.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(b"12")
    return tmp_path


def test_an_engine_takes_over_what_is_its_own_and_no_other(folder: Path):
    config = config_for(folder)
    changed = {
        "block size": (config, replace_spec(block_size=8)),
        "dtype": (config, replace_spec(dtype="bfloat16")),
        "layout": (config_for(folder, tp=2), [SPEC]),
        "model": (replace(config, model=replace(config.model, seed=5)), [SPEC]),
    }
    for name in (None, *changed):
        with kept() as memory:
            first = KeptPrefixes(memory.hand_over(), memory.incarnation)
            fd = first.of_workers()[0][0]
            assert first.look(config, [SPEC]) is None
            assert first.open(config, BLOCKS) is None, "no worker has mapped its memory"
            old = cache(fd)
            table = first.open(config, BLOCKS)
            assert table is not None
            table.put(3, A)
            second = KeptPrefixes(memory.hand_over(), memory.incarnation)
            if name is None:
                assert KeptPrefixes(memory.hand_over(), 1).look(config, [SPEC]) is None, "its own incarnation"
                continue
            del old
            assert second.look(*changed[name]) is None, name
            assert os.fstat(fd).st_size == 0, "it is given back"
    with kept() as memory:
        first = KeptPrefixes(memory.hand_over(), memory.incarnation)
        fd = first.of_workers()[0][0]
        first.look(config, [SPEC])
        cache(fd)
        table = first.open(config, BLOCKS)
        assert table is not None
        table.put(3, A)
        second = KeptPrefixes(memory.hand_over(), memory.incarnation)
        assert second.look(config, [SPEC]) == BLOCKS
        cache(fd)
        again = second.open(config, BLOCKS)
        assert again is not None
        assert again.entries == [(3, A)]
        os.ftruncate(fd, 0)
        third = KeptPrefixes(memory.hand_over(), memory.incarnation)
        assert third.look(config, [SPEC]) is None, "a rank's memory is not there"


def replace_spec(**changes: Any) -> list[KVSpec]:
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__}
    return [KVSpec(**(fields | changes))]


def test_other_files_are_another_model(folder: Path):
    config = config_for(folder)
    before = fingerprint(config, [SPEC])
    assert fingerprint(config, [SPEC]) == before
    (folder / "weights").write_bytes(b"123")
    assert fingerprint(config, [SPEC]) != before


def test_nothing_is_kept_without_a_prefix_cache(folder: Path):
    config = config_for(folder, tp=2)
    assert ranks_to_keep(config) == 2
    assert ranks_to_keep(replace(config, cache=CacheConfig(enable_prefix_caching=False))) == 0


class OwnExecutor(MultiprocExecutor):
    """Takes what it knows."""

    def __init__(self, config: EngineConfig, waiter: Any = None, forkserver: Any = None, on_phase: Any = None) -> None:
        super().__init__(config, waiter, forkserver, on_phase)


def test_nothing_is_kept_where_workers_would_not_get_it_or_share_out_tokens(folder: Path):
    config = config_for(folder, tp=2)
    for changes in (
        {"distributed_executor_backend": OwnExecutor},
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
    ):
        assert ranks_to_keep(replace(config, parallel=replace(config.parallel, **changes))) == 0


# When it may be used: the decision.


class Front:
    """The client, as ``Healing`` sees it."""

    def __init__(self) -> None:
        self.sent: list[EngineRequest | Abort] = []
        self.trusted: list[bool] = []
        self.said = EngineStats()
        self.healing = Healing(self, LIMITS)
        self.healing.began()

    def resend(self, message: EngineRequest | Abort) -> None:
        self.sent.append(message)

    def end_failed(self, output: RequestOutput) -> None:
        pass

    def renew(self, restart: Restarting, after_s: float) -> None:
        self.trusted.append(restart.trusted)

    def is_over(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return self.said

    def add(self, name: str) -> None:
        self.healing.submit(greedy(name, [1, 2, 3], 100))

    def token(self, name: str, index: int) -> None:
        self.healing.note(RequestOutput(request_id=name, first_index=index, token_ids=[5]))

    def die(self, what: str = "signal", type_: str = "SIGKILL", folded: list[FailureReport] | None = None) -> bool:
        self.healing.lost(FailureReport(role="Worker_TP0", what=what, type=type_, folded=folded or []))
        return self.trusted[-1]


@pytest.mark.parametrize(
    ("what", "kind", "trusted"),
    [
        ("signal", "SIGKILL", True),
        ("signal", "SIGTERM", True),
        ("oom", "SIGKILL", True),
        ("oom", "MemoryError", True),
        ("exit", "exit code 3", True),
        ("exception", "ValueError", True),
        ("signal", "SIGSEGV", False),
        ("signal", "SIGBUS", False),
        ("signal", "SIGILL", False),
        ("signal", "SIGABRT", False),
        ("hang", "", False),
        ("node lost", "", False),
    ],
)
def test_what_a_death_says_of_the_memory(what: str, kind: str, trusted: bool):
    front = Front()
    front.add("a")
    assert front.die(what, kind) == trusted
    front = Front()
    front.add("a")
    assert front.die(folded=[FailureReport(role="Worker_TP1", what=what, type=kind)]) == trusted


def test_a_death_before_a_token_starts_empty_and_one_after_progress_does_not():
    front = Front()
    front.add("a")
    front.token("a", 0)
    assert front.die()
    assert not front.die(), "the start failed"
    front.healing.renewed(None)
    assert not front.die(), "no token came"
    front.healing.forget(["a"])
    front.healing.renewed(None)
    front.add("b")
    front.token("b", 0)
    assert front.die()
    front.healing.renewed(None)
    front.token("b", 1)
    assert not front.die(), "b was there at two deaths in a row: it is suspect"


def test_the_log_says_how_much_is_computed_again(caplog: pytest.LogCaptureFixture):
    """When the engine has looked at all that it was sent; what was never sent before is not computed again."""
    front = Front()
    for name in ("a", "b"):
        front.add(name)
        front.token(name, 0)
    front.die()
    front.add("late")
    front.healing.renewed(None)
    assert [(one.request_id, one.sent_again) for one in front.sent if isinstance(one, EngineRequest)] == [
        ("a", True),
        ("b", True),
        ("late", False),
    ]
    front.said = EngineStats(sent_again=1, still_there=4)
    front.token("a", 1)
    assert "computed again" not in caplog.text
    front.said = EngineStats(sent_again=2, still_there=4)
    front.token("b", 1)
    assert "3 requests go on, 4 tokens of theirs are computed again, 4 are there" in caplog.text


# Processes.

SAID = re.compile(r"(\d+) tokens of theirs are computed again, (\d+) are there")


async def kill_amid(served: Engine, victim: str, number: int, name: str, tokens: int) -> list[int]:
    """Kill it when a request has so many tokens; all tokens of the request."""
    got: list[int] = []
    killed = False
    async for output in served.client.generate(greedy(name, prompt(1, 20), 60, ignore_eos=True)):
        got += output.token_ids
        if not killed and len(got) >= tokens:
            killed = True
            kill(served.pid(victim), number)
    return got


def test_what_is_left_is_used_after_a_kill_and_not_after_a_crash(
    tiny: tuple[Path, Any], caplog: pytest.LogCaptureFixture
):
    """And nothing of it stays once the engine is closed."""
    caplog.set_level(logging.WARNING)
    before = open_memfds()

    def said() -> tuple[int, int]:
        found = SAID.findall(caplog.text)
        caplog.clear()
        assert len(found) == 1
        return int(found[0][0]), int(found[0][1])

    with engine(config_for(tiny[0]), recovery=LIMITS) as served:
        assert open_memfds() - before == 2, "KV memory of one rank, and the table"
        plain = served.run(served.tokens(greedy("plain", prompt(1, 20), 60, ignore_eos=True)))
        served.run(served.client.call("reset_prefix_cache"))
        assert served.run(kill_amid(served, "EngineCore_DP0", signal.SIGKILL, "a", 30)) == plain
        again, there = said()
        assert there % 4 == 0
        assert there >= 40
        assert again <= 12
        assert open_memfds() - before == 2
        assert served.run(kill_amid(served, "EngineCore_DP0", signal.SIGSEGV, "b", 30)) == plain
        again, there = said()
        assert (there, again >= 50) == (0, True)
        assert served.run(served.client.call("collective_rpc", "check_health")) == [None]
        served.run(served.client.call("collective_rpc", "step_costs"))  # for all that is known it changes the worker
        assert served.run(kill_amid(served, "EngineCore_DP0", signal.SIGKILL, "c", 30)) == plain
        assert said()[1] == 0
        assert served.run(no_token_between(served, "d")) == plain
        assert said()[1] == 0
    assert open_memfds() == before


async def no_token_between(served: Engine, name: str) -> list[int]:
    """The second engine is killed before it gives a token."""
    recoveries = served.client.recoveries
    assert recoveries is not None
    first = served.pid("EngineCore_DP0")
    task = asyncio.create_task(kill_amid(served, "EngineCore_DP0", signal.SIGKILL, name, 30))
    while not recoveries.active:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    while not any(one.name == "EngineCore_DP0" and one.pid not in (0, first) for one in served.client.processes()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    kill(served.pid("EngineCore_DP0"), signal.SIGKILL)
    return await task


def test_the_table_is_where_the_engine_says(tiny: tuple[Path, Any]):
    """Forgetting all prefixes forgets what is left, too: read in the front end's memory file."""
    with engine(config_for(tiny[0], blocks=64), recovery=LIMITS) as served:
        served.run(served.tokens(greedy("a", prompt(1, 20), 10, ignore_eos=True)))
        memory = served.client._processes._memory
        assert memory is not None
        size = os.fstat(memory._table).st_size

        def left() -> list[tuple[int, bytes]]:
            buf = memoryview(bytearray(os.pread(memory._table, size, 0)))
            found = PrefixTable.read(buf)
            assert found is not None
            return PrefixTable(buf, found[0], 99, take_over=True).entries

        assert len(left()) == 29 // 4
        served.run(served.client.call("reset_prefix_cache"))
        assert left() == []
