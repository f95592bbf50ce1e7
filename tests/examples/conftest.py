"""The tiny model that the examples run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.llm.conftest import make_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny_llama"))
