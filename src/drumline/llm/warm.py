"""For programs that start one engine after the other."""

from __future__ import annotations

from drumline.engine.launch import preload_of_any
from drumline.processes.warm import WarmStart


def warm_start(platform: str = "auto") -> WarmStart:
    """Import torch, transformers and drumline's workers once for all engines of this program.

    ``with warm_start(): ...``, or ``close()`` it. It returns at once and imports in a process of its own;
    ``wait_ready()`` waits for that. Engines (``LLM``, ``AsyncLLM``) and executors that start while it is open, and once
    its imports are done, are copies of that process: they start in 1 to 2 s where it takes 7. Nothing else about them
    changes. One that would have other import-time variables, another working folder, other limits than this program
    had when it called this is started as ever.

    ``platform``: as of the engines. ConfigError if there is a warm start already.
    """
    return WarmStart(preload_of_any(platform))
