"""``python -m benchmarks.allreduce``: the time of an allreduce. Knows which collective it is, and nothing more."""

import sys


def _run() -> int:
    try:
        from benchmarks.cli import main  # takes a while, in which Ctrl-C is no reason for a traceback

        return main("allreduce")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(_run())
