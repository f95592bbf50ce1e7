"""``python -m drumline.processes.fresh FD``: a child that is executed instead of forked.

It reads what a forked child would have inherited from the descriptor, and then is like any other.
"""

from __future__ import annotations

import os
import sys

import msgspec

from drumline.processes.child import ChildStart, run_child
from drumline.processes.messages import FreshSpec
from drumline.processes.titles import set_title


def main() -> None:
    """Entry point."""
    fd = int(sys.argv[1])
    set_title("Fresh")  # before any change of the environment: setproctitle looks for where it lies in memory
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        spec = msgspec.msgpack.decode(file.read(), type=FreshSpec)
    sys.path[:] = spec.sys_path
    run_child(
        ChildStart(
            spawn=spec.spawn,
            env=spec.env,
            conn_fd=spec.conn_fd,
            fds=spec.fds,
            server_fd=spec.server_fd,
            server_pid=spec.server_pid,
            console_fd=spec.console_fd,
            log_dir=spec.log_dir,
            log_level=spec.log_level,
            grace_s=spec.grace_s,
        )
    )


if __name__ == "__main__":
    main()
