"""For users' own tests: several ranks in one process, over real sockets or in memory."""

from asynccoll.testing.worlds import local_world

__all__ = ["local_world"]
