"""``python -m asynccoll``. Knows only that there is a command line."""

from __future__ import annotations

import sys

from asynccoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
