"""An operation has an event of torch's profiler, with the name and the shapes that torch's own groups give theirs."""

import threading

import pytest

torch = pytest.importorskip("torch")

from asynccoll.torch.profiles import profiled  # noqa: E402

pytestmark = pytest.mark.torch


def test_without_a_profiler_nothing_is_added():
    def finish(_):
        raise AssertionError

    assert profiled("allreduce", [torch.ones(2)], finish) is finish
    assert profiled("allreduce", [torch.ones(2)], None) is None


@pytest.mark.parametrize("where", ["in another thread", "in the caller's"])
def test_the_event_is_asynchronous_and_has_the_inputs_shapes(where):
    came = []
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        end = profiled("allreduce", [torch.ones(2, 3), torch.ones(4)], came.append)
        if where == "in another thread":
            thread = threading.Thread(target=end, args=([1],))
            thread.start()
            thread.join()
        else:
            end([1])
    (event,) = [event for event in profile.function_events if event.name == "asynccoll:all_reduce"]
    assert event.is_async
    assert event.input_shapes == [[2, 3], [4]]
    assert came == [[1]]
