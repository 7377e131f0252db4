"""For users' own tests: several ranks in one process, over real sockets or in memory, or simulated with faults in virtual time."""

from asynccoll.sim.driver import Conditions
from asynccoll.sim.faults import Cancel, Crash, Cut, Fault, Partition, Restart, Slow, Stall
from asynccoll.sim.loop import Stuck
from asynccoll.testing.simulation import Crashed, Simulation, Stopped
from asynccoll.testing.worlds import local_world

__all__ = [
    "Cancel",
    "Conditions",
    "Crash",
    "Crashed",
    "Cut",
    "Fault",
    "Partition",
    "Restart",
    "Simulation",
    "Slow",
    "Stall",
    "Stopped",
    "Stuck",
    "local_world",
]
