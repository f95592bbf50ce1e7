from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of a tiny random Llama, and the same model in transformers."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    return folder, make_tiny(folder, "llama")


@pytest.fixture(autouse=True, scope="module")
def start_warm(engines_start_warm: None) -> None:
    """See tests/conftest.py."""
