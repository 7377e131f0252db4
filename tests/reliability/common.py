"""What the commands share: how they tell of progress, and how they end. Knows no figure.

A command says what it does on stderr, prints one line of JSON with its figures on stdout, and exits with 1 if anything failed.
"""

import asyncio
import json
import sys

LOOPS = {"asyncio": asyncio.new_event_loop}
"""Event loops by name, as far as they are installed."""
try:
    import uvloop
except ImportError:
    pass
else:
    LOOPS["uvloop"] = uvloop.new_event_loop


def tell(text):
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def conclude(failures, **figures):
    """Print the figures and what failed (strings, each with the command that replays it). The exit code."""
    for failure in failures:
        tell(f"FAILED {failure}")
    print(json.dumps({**figures, "failures": len(failures)}), flush=True)
    return 1 if failures else 0
