"""Both ways of a small message: in machine code, and without."""

from __future__ import annotations

import pytest

from drumline.transport.native import NO_NATIVE_VARIABLE


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with machine code and once more without, here and in processes that it starts."""
    monkeypatch.setenv(NO_NATIVE_VARIABLE, "0" if request.param == "native" else "1")
    return str(request.param)
