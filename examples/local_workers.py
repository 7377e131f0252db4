"""Workers that stay: estimates pi on four local processes, more precisely with every run.

    python examples/local_workers.py

The workers keep their random generators and counts between the runs.
"""

import numpy as np

import asynccoll.sync as ac


def set_up(seed: int) -> None:
    global generator, counts
    generator = np.random.default_rng(seed + ac.rank())
    counts = np.zeros(2)  # points within the circle, and all


def estimate(points: int) -> float:
    x, y = generator.random((2, points))
    counts[:] += (np.count_nonzero(x * x + y * y < 1), points)
    inside, everything = ac.allreduce(counts)
    return 4 * inside / everything


def main() -> None:
    with ac.local(4) as workers:
        workers.run(set_up, 7)
        for _ in range(3):
            first, *others = workers.run(estimate, 100_000)
            assert others == [first] * 3  # the same bits on every rank
            print(f"pi is about {first:.4f}")


if __name__ == "__main__":
    main()
