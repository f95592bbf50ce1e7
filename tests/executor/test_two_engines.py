"""Two engines in one process: groups belong to the worker, nothing of them is global."""

from __future__ import annotations

from tests.executor.conftest import Make


def test_two_uni_engines_in_one_process(make: Make) -> None:
    first, second = make("uni", worker="Gloo"), make("uni", worker="Gloo")
    futures = [engine.collective_rpc("total", non_block=True) for engine in (first, second) for _ in range(3)]
    assert [future.result(timeout=30) for future in futures] == [[1.0]] * 6
    first.shutdown()
    assert second.collective_rpc("total") == [1.0]


def test_a_uni_engine_beside_one_of_several_processes(make: Make) -> None:
    alone, several = make("uni", worker="Gloo"), make("mp", 2, worker="Gloo")
    assert several.collective_rpc("total") == [3.0, 3.0]
    assert alone.collective_rpc("total") == [1.0]
    several.shutdown()
    assert alone.collective_rpc("total") == [1.0]
