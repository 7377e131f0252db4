"""A process that really runs out of descriptors while the mesh forms: it pauses, keeps what it has, and goes on."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest
from forming import close, form, free_port

pytest.importorskip("resource")

ZERO = """
import asyncio, json, logging, os, resource, sys, time
from asynccoll.net import accepting
from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import form_mesh

logging.basicConfig(stream=sys.stderr)
pauses = []
pause = accepting.Acceptor._pause

def counted(self, error):
    if not pauses:
        print(json.dumps({"starved": os.strerror(error.errno)}), flush=True)
    pauses.append(time.monotonic())
    pause(self, error)

accepting.Acceptor._pause = counted

async def main():
    place = Placement(rank=0, size=3, host="127.0.0.1", port=int(sys.argv[1]))
    forming = asyncio.ensure_future(form_mesh(place, b"the ranks know this", init_timeout=60))
    await asyncio.sleep(0)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 12, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print(json.dumps({"open": True}), flush=True)
    links = await forming
    print(json.dumps({"pauses": len(pauses), "seconds": pauses[-1] - pauses[0]}), flush=True)
    loop = asyncio.get_running_loop()
    for peer, sock in links.sockets.items():
        await loop.sock_sendall(sock, bytes([0, peer]))
        assert await loop.sock_recv(sock, 16) == bytes([peer, 0])
    links.close()

asyncio.run(main())
"""


def start(port):
    return subprocess.Popen(
        [sys.executable, "-c", ZERO, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


async def test_a_mesh_forms_after_its_rank_0_had_no_descriptors_left():
    port = free_port()
    process = start(port)
    loop = asyncio.get_running_loop()

    async def told():
        line = await loop.run_in_executor(None, process.stdout.readline)
        return json.loads(line or '"it has ended"')

    try:
        assert await told() == {"open": True}
        # One rank is in before the descriptors are gone, and must stay in.
        one = asyncio.ensure_future(form(1, 3, port, init_timeout=60.0))
        crowd = []
        starved = asyncio.ensure_future(told())
        while not starved.done():
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", port))
            crowd.append(sock)
            await asyncio.sleep(0.01)  # a poll
        assert starved.result() == {"starved": "Too many open files"}
        for sock in crowd:
            sock.close()
        two = asyncio.ensure_future(form(2, 3, port, init_timeout=60.0))
        facts = await told()
        links = await asyncio.gather(one, two)
        # A try every 0.1 s: it has not spun on a listener that stays readable.
        assert 1 <= facts["pauses"] <= facts["seconds"] / 0.1 + 2
        for mesh in links:
            sock = mesh.sockets[0]
            assert await loop.sock_recv(sock, 16) == bytes([0, mesh.rank])
            await loop.sock_sendall(sock, bytes([mesh.rank, 0]))
        assert process.wait(timeout=60) == 0
        close(links)
        assert process.stderr.read().count("cannot accept connections for now") == 1
    finally:
        process.kill()
        process.communicate()
