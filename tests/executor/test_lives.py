"""One executor after the other, of changing sizes: each ends wholly, however often and from wherever it is told to."""

from __future__ import annotations

import os
import threading

import pytest

from drumline.errors import DrumlineError
from drumline.executor import Executor
from tests.engine.processes import wait_gone
from tests.held import Held, check_flat, held

from .conftest import configure

LIVES = 20


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_twenty_lives_with_changing_sizes() -> None:
    seen: list[Held] = []
    pids: set[int] = set()
    for life in range(LIVES):
        size = 1 + life % 4
        config = configure("uni" if size == 1 and life % 8 else "mp", size)
        executor = Executor.get_class(config)(config)
        pids |= {state.pid for state in executor.workers()} - {os.getpid()}
        assert executor.collective_rpc(lambda worker: worker.rank) == list(range(size))
        threads = [threading.Thread(target=executor.shutdown) for _ in range(2)]
        for thread in threads:
            thread.start()
        executor.shutdown()
        wait_gone(list(pids), 0.5)
        for thread in threads:
            thread.join()
        executor.shutdown()
        with pytest.raises(DrumlineError):
            executor.collective_rpc("get_life")
        del executor
        seen.append(held(seen[0] if seen else None))
    check_flat(seen)
