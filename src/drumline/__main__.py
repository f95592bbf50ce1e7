"""``python -m drumline``: the same as the ``drumline`` command."""

from __future__ import annotations

import sys

from drumline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
