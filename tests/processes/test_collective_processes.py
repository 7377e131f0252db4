"""adaptdl.collective's rules where processes die, end early or are interrupted."""

import signal

import pytest
from scripts import run_ranks

COLLECTIVE = """
from asynccoll import collective

for name in ("MASTER_ADDR", "MASTER_PORT"):
    os.environ["ADAPTDL_" + name] = os.environ.pop("ASYNCCOLL_" + name)
os.environ["ADAPTDL_REPLICA_RANK"] = os.environ.pop("ASYNCCOLL_RANK")
os.environ["ADAPTDL_NUM_REPLICAS"] = os.environ.pop("ASYNCCOLL_WORLD_SIZE")

def attempt(call, *args):
    try:
        return call(*args)
    except RuntimeError as error:
        say(error="RuntimeError", text=str(error))
    except asynccoll.CollectiveError as error:
        say(error=type(error).__name__, rank=getattr(error, "peer", getattr(error, "origin", None)))

collective.initialize()
"""
WITHIN = 5.0
"""Seconds from a death to the last thing that a survivor says about it."""


def run(program, size, **env):
    return run_ranks(COLLECTIVE + program, size, env=env)


def said(process):
    return [{key: value for key, value in fact.items() if key != "at"} for fact in process.said]


def test_s13_a_dead_replica_is_named_by_every_other_and_a_new_world_may_follow():
    """What is pending and what is called later fail; teardown says so too, and has closed."""
    ended = run(
        """
if RANK == 1:
    collective.allreduce(0)
    say(last=True)
    os.kill(os.getpid(), signal.SIGKILL)
attempt(collective.allreduce, 0)  # fails too where the death is seen before the result
attempt(collective.allreduce, 1)
attempt(collective.broadcast, 1)
attempt(collective.allreduce_async(1).result)
attempt(collective.teardown)
attempt(collective.teardown)
collective.initialize(num_replicas=1, replica_rank=0)
say(alone=collective.allreduce(5))
""",
        3,
    )
    assert ended[1].code == -signal.SIGKILL
    died = ended[1].said[-1]["at"]
    lost = {"error": "PeerLost", "rank": 1}
    closed = {"error": "RuntimeError", "text": "adaptdl.collective has not been initialized"}
    for rank in (0, 2):
        facts = said(ended[rank])
        assert facts[-6:] == [lost] * 4 + [closed, {"alone": 5}], ended[rank].errors
        assert facts[:-6] in ([], [lost])
        assert ended[rank].code == 0, ended[rank].errors
        assert ended[rank].said[-1]["at"] - died < WITHIN


@pytest.mark.parametrize("size", [2, 5])
def test_s13_a_replica_may_end_after_its_last_result_without_teardown(size):
    """As all programs of the seed do, whose teardown is not implemented. Results of 8 MB are on their way when rank 0 ends."""
    ended = run(
        """
total = collective.allreduce(bytes([RANK]) * (8 << 20), lambda a, b: b)
say(last=total[-1], length=len(total))
""",
        size,
    )
    for process in ended:
        assert process.code == 0, process.errors
        assert said(process) == [{"last": size - 1, "length": 8 << 20}]


def test_s13_teardown_where_a_replica_has_ended_names_it_and_closes():
    ended = run(
        """
collective.allreduce(0)
if RANK == 0:
    attempt(collective.teardown)
    attempt(collective.teardown)
""",
        2,
    )
    assert [process.code for process in ended] == [0, 0]
    closed = {"error": "RuntimeError", "text": "adaptdl.collective has not been initialized"}
    assert said(ended[0]) == [{"error": "PeerLost", "rank": 1}, closed]


def test_teardown_finishes_what_is_under_way_even_if_nobody_has_asked_for_it():
    ended = run(
        """
pending = [collective.allreduce_async(bytes([n]) * (8 << 20), lambda a, b: b) for n in range(4)]
collective.teardown()
say(done=[future.done() for future in pending], right=[future.result(0)[0] for future in pending])
""",
        3,
    )
    for process in ended:
        assert process.code == 0, process.errors
        assert said(process) == [{"done": [True] * 4, "right": [0, 1, 2, 3]}]


def test_ctrl_c_ends_the_wait_and_the_operation_everywhere(tmp_path):
    """A thread of rank 0 interrupts it as soon as it waits; rank 1 calls only then."""
    ended = run(
        """
import threading, traceback
main = threading.get_ident()

def interrupt():
    while "result" not in [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

if RANK == 0:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        collective.broadcast("never")
    except KeyboardInterrupt:
        say(interrupted=True)
    open(os.environ["READY"], "w").close()
else:
    while not os.path.exists(os.environ["READY"]):
        time.sleep(0.001)
    attempt(collective.broadcast, None)
say(next=collective.allreduce(1))
collective.teardown()
""",
        2,
        READY=str(tmp_path / "ready"),
    )
    assert said(ended[0]) == [{"interrupted": True}, {"next": 2}]
    assert said(ended[1]) == [{"error": "CollectiveCancelled", "rank": 0}, {"next": 2}]
