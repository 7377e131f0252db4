"""A program: many processes form one mesh at once, with as little started as possible. Prints one line per failure.

usage: crowd.py SIZE HOST PORT INIT_TIMEOUT [uvloop]
"""

import asyncio
import os
import sys
import traceback

import asynccoll.net.rendezvous as rendezvous
from asynccoll.net.launchers import Placement

SIZE, HOST, PORT, INIT_TIMEOUT = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


async def one(rank):
    placement = Placement(rank=rank, size=SIZE, host=HOST, port=PORT)
    links = await rendezvous.form_mesh(placement, b"crowd", init_timeout=INIT_TIMEOUT)
    # Every rank says its number to every other: the right one must be at the other end of each.
    for sock in links.sockets.values():
        sock.send(rank.to_bytes(2, "big"))
    loop = asyncio.get_running_loop()
    for peer, sock in links.sockets.items():
        heard = b""
        while len(heard) < 2:
            heard += await loop.sock_recv(sock, 2 - len(heard))
        if int.from_bytes(heard, "big") != peer:
            raise AssertionError(f"rank {rank}: {heard!r} came from rank {peer}")
    links.close()


def main():
    """Fork from a process that has imported all it needs, holds them back on a pipe, then lets all go at once."""
    if "uvloop" in sys.argv:
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    hold, release = os.pipe()
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(hold, 1)
            status = 1
            try:
                asyncio.run(one(rank))
                status = 0
            except Exception:  # noqa: BLE001 (reported, then the process ends)
                print(f"rank {rank}: {traceback.format_exc()}", flush=True)
            os._exit(status)
        children.append(child)
    os.close(release)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    print(f"{SIZE - failed} of {SIZE} formed the mesh", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
