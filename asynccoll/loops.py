"""Which event loops there are to run on. Knows what this package asks of a loop, not what it does with it."""

from __future__ import annotations

import asyncio
import socket

__all__ = ["new_loop", "require_watching"]


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop where that is installed, else of asyncio; one that watches sockets, which Windows' usual one does not."""
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def require_watching(loop: asyncio.AbstractEventLoop) -> None:
    """RuntimeError if ``loop`` cannot watch descriptors, as Windows' usual one cannot: every mesh needs that."""
    with socket.socket() as probe:
        try:
            loop.remove_reader(probe.fileno())
        except NotImplementedError:
            raise RuntimeError(
                f"asynccoll watches its sockets with add_reader(), which {type(loop).__name__} does not have. Run it on a selector "
                "loop: with asynccoll.run(main()), or with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)"
            ) from None
