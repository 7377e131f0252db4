"""Counts the turns of an event loop while something else is awaited in it. The source of the class goes into tests' programs."""

import asyncio
import inspect


class Turning:
    """A context manager: ``count`` grows by one for about each millisecond in which the loop is free."""

    def __enter__(self):
        self.count = 0
        self._ticker = asyncio.create_task(self._turn())
        return self

    def __exit__(self, *_):
        self._ticker.cancel()

    async def _turn(self):
        while True:
            self.count += 1
            await asyncio.sleep(0.001)


SOURCE = inspect.getsource(Turning) + "\n"
"""For programs that import asyncio themselves."""
