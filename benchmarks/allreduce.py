"""``python -m benchmarks.allreduce``: the time of an allreduce. Knows which collective it is, and nothing more."""

from benchmarks.cli import main

if __name__ == "__main__":
    raise SystemExit(main("allreduce"))
