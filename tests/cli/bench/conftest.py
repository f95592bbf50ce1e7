from __future__ import annotations

import uvloop

# libuv keeps a pipe for signals from its first loop on, which is no leak of a test.
uvloop.new_event_loop().close()
