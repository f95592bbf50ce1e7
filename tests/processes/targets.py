"""What child processes of the tests run."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path

from drumline.processes import ChildContext, ProcessSpec, Supervisor


def serve(context: ChildContext, payload: bytes) -> None:
    """Ready, then echo until stopped."""
    context.listen(lambda data: context.send(b"echo " + data))
    context.ready(b"info of " + payload)
    context.wait_stop()
