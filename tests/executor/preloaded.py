"""A module that a fork server imports: what it is like there, before torch is imported and after."""

from __future__ import annotations

import os
import sys

BEFORE = {
    "torch": "torch" in sys.modules,
    "env": [os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")],
}

import torch  # noqa: E402

AFTER = torch.get_num_threads()
