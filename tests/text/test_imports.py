"""The text room and LLM cost neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "drumline.text.tokenizer, drumline.text.chat, drumline.text.detokenize, drumline.text.requests, "
        "drumline.text.results, drumline.plan.sampling",
        "drumline.llm",
    ],
)
def test_neither_torch_nor_transformers(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit(' '.join({{'torch', 'transformers'}} & set(sys.modules)) or 0)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
