"""``FD`` as the first argument: a child that is executed instead of forked.

It reads what a forked child would have inherited from the descriptor, and then is like any other.
"""

from __future__ import annotations

import os
import sys
from typing import cast

import msgspec

from drumline.processes.child import ChildStart, run_child
from drumline.processes.messages import FreshSpec, unpack_env
from drumline.processes.titles import set_title


def main() -> None:
    """Entry point."""
    fd = int(sys.argv[1])
    set_title("Fresh")  # before any change of the environment: setproctitle looks for where it lies in memory
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        spec = msgspec.msgpack.decode(file.read(), type=FreshSpec)
    sys.path[:] = map(os.fsdecode, spec.sys_path)
    run_child(
        ChildStart(
            spawn=spec.spawn,
            env=cast("dict[str, str]", unpack_env(spec.env)),
            conn_fd=spec.conn_fd,
            fds=spec.fds,
            server_fd=spec.server_fd,
            server_pid=spec.server_pid,
            console_fd=spec.console_fd,
            log_dir=os.fsdecode(spec.log_dir),
            log_level=spec.log_level,
            grace_s=spec.grace_s,
            root_role=spec.root_role,
            root_pid=spec.root_pid,
            of_root=spec.of_root,
            own=spec.own,
            allowed=tuple(spec.allowed),
        )
    )
