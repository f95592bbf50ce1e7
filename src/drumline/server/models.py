"""From the model's name to its folder, while HTTP answers already.

Resolving blocks (files, network, a process that converts the embedded model), so it runs in a thread of its own. It
cannot be cancelled there: the thread is a daemon, and the processes that it started end when this one is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

from drumline.config import EngineConfig, ModelConfig
from drumline.model.default_model import NAME as DEFAULT_NAME
from drumline.model.progress import ConsoleProgress
from drumline.model.resolve import resolve as resolve_model

__all__ = ["DEFAULT_NAME", "resolve"]


async def resolve(config: EngineConfig, set_phase: Callable[[str], None]) -> EngineConfig:
    """The configuration with the model's folder in it. ConfigError if there is no such model or it cannot be served.

    Progress goes to the console as a bar, and to ``set_phase`` as text (called in the loop).
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ModelConfig] = loop.create_future()
    bar = ConsoleProgress()

    def progress(text: str, fraction: float) -> None:
        bar(text, fraction)
        _soon(loop, set_phase, f"{text} {fraction:.0%}")

    def finish(found: ModelConfig | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        elif found is not None:
            done.set_result(found)

    def work() -> None:
        try:
            found = resolve_model(config.model, progress)
        except Exception as e:  # noqa: BLE001 - raised again by whoever waits
            _soon(loop, finish, None, e)
        else:
            _soon(loop, finish, found, None)

    threading.Thread(target=work, name="drumline-resolve", daemon=True).start()
    return replace(config, model=await done)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        pass  # the loop is closed: the command ended meanwhile
