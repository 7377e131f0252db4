"""The plain script: no event loop in sight. The mean of one number per rank.

asynccoll run -n 4 examples/mean.py
"""

import numpy as np

import asynccoll.sync as ac

with ac.init() as comm:
    mine = np.array([float(comm.rank), 1.0])
    mean, one = ac.allreduce(mine, "avg")
    everyone = ac.allgather(comm.rank)
    if comm.rank == 0:
        print(f"mean of {everyone} is {mean}")
    assert mean == (comm.world_size - 1) / 2
    assert one == 1.0
