from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def start_warm(engines_start_warm: None) -> None:
    """See tests/conftest.py."""
