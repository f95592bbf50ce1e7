from __future__ import annotations

from pathlib import Path

import pytest

from drumline.text.tokenizer import Tokenizer

from .vocab import byte_fallback_folder, byte_level_folder


@pytest.fixture(scope="session")
def byte_level_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_fallback_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_fallback_folder(tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture(scope="session")
def byte_level(byte_level_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_path)


@pytest.fixture(scope="session")
def byte_fallback(byte_fallback_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_fallback_path)
