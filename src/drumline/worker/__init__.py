"""The worker side of the executor: any class whose constructor takes a WorkerContext runs in this loop.

``protocol`` what the language-model engine calls, ``wrapper`` how a worker is made and ended, ``segment`` shared
memory, ``wire`` calls and answers as bytes, ``loop`` the loop, ``outputs`` the thread that finishes outputs, ``main``
the process.
"""

from __future__ import annotations

from drumline.worker.outputs import AsyncOutput
from drumline.worker.protocol import Worker, WorkerContext

__all__ = ["AsyncOutput", "Worker", "WorkerContext"]
