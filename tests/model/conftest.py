from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig, ModelConfig, ParallelConfig
from drumline.model.worker import ModelWorker
from drumline.plan.kv import KVConfig
from drumline.worker.protocol import WorkerContext
from tests.model.ranks import RankHost
from tests.model.tiny import FLAT_SHAPES, SECOND_SHAPES, SHAPES, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and transformers model of a shape, made at first use."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(shape: str) -> tuple[Path, Any]:
        if shape not in made:
            folder = tmp_path_factory.mktemp(shape)
            made[shape] = folder, make_tiny(folder, shape)
        return made[shape]

    return get


@pytest.fixture(
    params=[pytest.param(shape, marks=pytest.mark.matrix if shape in SECOND_SHAPES else ()) for shape in SHAPES]
)
def shape(request: pytest.FixtureRequest) -> str:
    """Each of the tiny models."""
    return str(request.param)


@pytest.fixture(params=FLAT_SHAPES)
def flat_shape(request: pytest.FixtureRequest) -> str:
    """Each of the tiny models that the fast forwards know."""
    return str(request.param)


@pytest.fixture(scope="module")
def _rank_host() -> Iterator[RankHost]:
    host = RankHost()
    yield host
    host.close()


@pytest.fixture
def rank_host(_rank_host: RankHost) -> Iterator[RankHost]:
    """A process that forks ranks. They end with the test."""
    yield _rank_host
    _rank_host.stop()


def engine_config(folder: Path, tp: int = 1, pp: int = 1, **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), path=str(folder), **model),
        parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        platform="cpu",
    )


def start_worker(config: EngineConfig, num_blocks: int = 128, block_size: int = 4) -> ModelWorker:
    """A worker of world size 1, ready for steps."""
    worker = ModelWorker(WorkerContext(config=config, rank=0, local_rank=0, distributed_init_method="", is_driver=True))
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config([KVConfig(num_blocks=num_blocks, block_size=block_size)])
    worker.compile_or_warm_up_model()
    return worker


@pytest.fixture(autouse=True, scope="module")
def start_warm(engines_start_warm: None) -> None:
    """See tests/conftest.py."""
