"""Cells of a real notebook kernel: the blocking facade, await at the top level, local workers, and the interrupt button."""

import contextlib
import queue
import textwrap
import time
from typing import NamedTuple

import pytest

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

DEADLINE = 60
"""Seconds after which a cell hangs: none of these takes one."""

TELL_WHEN_BLOCKED = """
import sys, threading, time, traceback

def tell_when_blocked(*names):
    main = threading.main_thread().ident
    def stack():
        return [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
    def tell():
        while not set(names) <= set(stack()):
            time.sleep(0.001)
        print("blocked", flush=True)
    threading.Thread(target=tell).start()
"""


class Ended(NamedTuple):
    """What became of a cell."""

    text: str
    """What it printed, and its last value."""
    error: tuple[str, str] | None
    """Type and message of the exception that ended it."""


class Kernel:
    def __init__(self, owner, client):
        self.owner = owner
        self.client = client

    def start(self, code):
        return self.client.execute(textwrap.dedent(code), stop_on_error=False)

    def events(self, cell):
        """What the kernel tells of a cell, until it is idle again."""
        end = time.monotonic() + DEADLINE
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"the cell was not over after {DEADLINE} s") from None
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            yield kind, content

    def run(self, code, *, interrupt_at=None):
        """Run a cell to its end. ``interrupt_at``: press the button once when it has printed this."""
        text, error = "", None
        cell = self.start(code)
        for kind, content in self.events(cell):
            if kind == "stream":
                text += content["text"]
                if interrupt_at is not None and interrupt_at in text:
                    self.owner.interrupt_kernel()
                    interrupt_at = None
            elif kind == "execute_result":
                text += content["data"]["text/plain"]
            elif kind == "error":
                error = content["ename"], content["evalue"]
        return Ended(text, error)

    def value(self, code):
        """What a cell that must not fail has printed, with its last value."""
        ended = self.run(code)
        assert ended.error is None, ended
        return ended.text


@pytest.fixture(scope="module")
def kernel():
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.delenv(
            "PYTEST_CURRENT_TEST", raising=False
        )  # with it a kernel does not show what its children write
        owner, client = manager.start_new_kernel(startup_timeout=DEADLINE)
        stack.callback(owner.shutdown_kernel, now=True)
        stack.callback(client.stop_channels)
        found = Kernel(owner, client)
        found.value(TELL_WHEN_BLOCKED + "import asynccoll\nimport asynccoll.sync as ac\nimport numpy as np")
        yield found


def test_the_blocking_facade_works_in_cells(kernel):
    kernel.value("ac.init()")
    assert kernel.value("ac.allreduce(np.arange(3), 'sum').tolist()") == "[0, 1, 2]"
    assert kernel.value("[view.tolist() for _, view in ac.allreduce_stream(np.ones(2))]") == "[[1.0, 1.0]]"
    assert kernel.value("ac.shutdown()\nac.init()\nac.rank(), ac.world_size()") == "(0, 1)"
    kernel.value("ac.shutdown()")


def test_await_works_in_cells_and_the_communicator_stays_for_the_next(kernel):
    assert kernel.value("comm = await asynccoll.init()\ncomm.world_size") == "1"
    assert kernel.value("(await comm.allreduce(np.arange(3))).tolist()") == "[0, 1, 2]"
    assert kernel.value("work = asynccoll.allgather('x')") == ""
    assert kernel.value("await work") == "['x']"
    assert kernel.value("[o async for o, view in asynccoll.allreduce_stream(np.ones(2))]") == "[0]"
    kernel.value("await asynccoll.shutdown()")


def test_both_at_once(kernel):
    code = """
        async with asynccoll.connect() as one:
            with ac.connect() as two:
                found = await one.allreduce(1), two.allreduce(2)
        found
        """
    assert kernel.value(code) == "(1, 2)"


def test_local_workers_stay_for_the_next_cells(kernel):
    kernel.value("workers = await asynccoll.local(2)")
    kernel.value(
        """
        async def total(x):
            return await asynccoll.allreduce(x + asynccoll.rank())
        """
    )
    assert kernel.value("await workers.run(total, 5)") == "[11, 11]"
    kernel.value("def keep(x):\n    global kept\n    kept = x\nawait workers.run(keep, [7])")
    assert kernel.value("await workers.run(lambda: kept)") == "[[7], [7]]"
    kernel.value("await workers.close()")


def test_what_workers_print_is_shown_with_the_rank(kernel):
    text = kernel.value(
        """
        async with asynccoll.local(2) as workers:
            await workers.run(lambda: print("hello from", asynccoll.rank()))
        """
    )
    assert {"[0] hello from 0", "[1] hello from 1"} <= set(text.splitlines())


def test_blocking_local_workers(kernel):
    kernel.value("workers = ac.local(2)")
    assert kernel.value("workers.run(lambda x: ac.allreduce(x + ac.rank()), 1)") == "[3, 3]"
    kernel.value("workers.close()")


class TestInterrupt:
    def test_of_a_blocked_verb_is_a_keyboard_interrupt_and_the_next_works(self, kernel):
        kernel.value("ac.init()")
        ended = kernel.run("tell_when_blocked('settle', 'wait')\nac.recv()", interrupt_at="blocked")
        assert ended.error == ("KeyboardInterrupt", "")
        assert kernel.value("ac.allreduce(2)") == "2"
        kernel.value("ac.shutdown()")

    def test_of_blocking_workers_keeps_them(self, kernel):
        kernel.value("workers = ac.local(2)\nimport os, time\npids = workers.run(os.getpid)")
        code = "tell_when_blocked('settle', 'wait')\nworkers.run(lambda: time.sleep(1000))"
        assert kernel.run(code, interrupt_at="blocked").error == ("KeyboardInterrupt", "")
        assert kernel.value("workers.run(os.getpid) == pids, workers.run(lambda: ac.allreduce(1))") == (
            "(True, [2, 2])"
        )
        kernel.value("workers.close()")

    def test_of_a_cell_that_awaits_workers_keeps_them(self, kernel):
        kernel.value("workers = await asynccoll.local(2)")
        code = """
            async def hang():
                print("blocked", flush=True)
                await asynccoll.recv()

            await workers.run(hang)
            """
        name, _ = kernel.run(code, interrupt_at="blocked").error
        assert name in ("KeyboardInterrupt", "CancelledError")
        assert kernel.value("await workers.run(lambda: asynccoll.allreduce(1))") == "[2, 2]"
        kernel.value("await workers.close()")


class TestFailure:
    """An exception of the user's own code comes out of the cell as it is."""

    MINE = ("RuntimeError", "mine")

    def test_beside_an_open_mesh(self, kernel):
        assert kernel.run("with ac.connect():\n    raise RuntimeError('mine')").error == self.MINE
        assert (
            kernel.run("async with asynccoll.connect():\n    raise RuntimeError('mine')").error == self.MINE
        )

    def test_in_a_loop_over_parts(self, kernel):
        code = "for _ in ac.allreduce_stream(np.ones(3)):\n    raise RuntimeError('mine')"
        kernel.value("ac.init()")
        assert kernel.run(code).error == self.MINE
        kernel.value("ac.shutdown()")

    def test_on_a_worker(self, kernel):
        kernel.value("def fail():\n    raise RuntimeError('mine')")
        code = "async with asynccoll.local(2) as workers:\n    await workers.run(fail)"
        assert kernel.run(code).error == self.MINE
        assert kernel.run("with ac.local(2) as workers:\n    workers.run(fail)").error == self.MINE
