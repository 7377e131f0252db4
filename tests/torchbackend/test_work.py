"""`GroupWork`: its end, its errors, its future, and the threads that run callbacks. No mesh: the operations are plain futures."""

import concurrent.futures
import pickle
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 (after the skip)

from asynccoll.errors import CollectiveTimeout, PeerLost  # noqa: E402
from asynccoll.torch.work import Callbacks, GroupWork, Started, as_torch_error  # noqa: E402

pytestmark = pytest.mark.torch

LIMIT = 30


@pytest.fixture
def callbacks():
    found = Callbacks()
    yield found
    found.close()


@pytest.fixture
def parts():
    return [concurrent.futures.Future(), concurrent.futures.Future()]


def test_it_ends_when_all_its_operations_have(parts, callbacks):
    work = GroupWork(Started(parts, []), callbacks)
    parts[1].set_result(None)
    assert (work.is_completed(), work.is_success(), work.exception()) == (False, False, None)
    parts[0].set_result(None)
    assert work.wait()
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)


def test_without_operations_it_has_ended(callbacks):
    assert GroupWork(Started([], []), callbacks).wait()


def test_the_finish_comes_before_anybody_hears_of_the_end(parts, callbacks):
    tensor = torch.zeros(2)
    work = GroupWork(Started(parts, [tensor], lambda results: tensor.add_(sum(results))), callbacks)
    seen = []
    work.add_done_callback(lambda _: seen.append(tensor.tolist()))
    for number, part in enumerate(parts):
        part.set_result(number + 1)
    assert seen == [[3, 3]]
    assert work.result()[0] is tensor


def test_one_error_is_raised_once_all_have_ended(parts, callbacks):
    finished = []
    work = GroupWork(Started(parts, [], finished.append), callbacks)
    parts[0].set_exception(PeerLost([3], "died"))
    assert not work.is_completed()  # the other operation still writes to its tensor
    parts[1].set_result(None)
    for _ in range(2):
        with pytest.raises(PeerLost) as caught:
            work.wait()
        assert caught.value.peers == {3}
    assert not finished
    assert isinstance(work.exception(), PeerLost)
    assert not work.is_success()


def test_an_error_of_the_finish_is_raised(parts, callbacks):
    def finish(_):
        raise ValueError("other size")

    work = GroupWork(Started(parts[:1], [], finish), callbacks)
    parts[0].set_result(None)
    with pytest.raises(ValueError, match="other size"):
        work.wait()


def test_one_that_nobody_waited_for_outlives_its_last_reference_in_python(callbacks):
    # C++ may hold its half alone, and calls wait() of this one.
    dropped, awaited = (GroupWork(Started([], [torch.ones(1)]), callbacks) for _ in range(2))
    awaited.wait()
    kept = id(dropped)
    del dropped, awaited
    (work,) = callbacks.unawaited
    assert id(work) == kept
    assert work.wait()
    assert work.tensors == []  # no memory is kept
    callbacks.close()
    assert not callbacks.unawaited


def test_a_wait_with_a_limit_gives_up_and_the_operation_goes_on(parts, callbacks):
    work = GroupWork(Started(parts[:1], []), callbacks)
    with pytest.raises(dist.DistBackendError, match=r"not complete within 0\.01 s"):
        work.wait(timedelta(milliseconds=10))
    assert not parts[0].cancelled()
    parts[0].set_result(None)
    assert work.wait(timedelta(seconds=LIMIT))


class TestFuture:
    def test_it_gives_the_tensors(self, parts, callbacks):
        tensor = torch.ones(1)
        work = GroupWork(Started(parts[:1], [tensor]), callbacks)
        future = work.get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        parts[0].set_result(None)
        assert future.wait()[0] is tensor
        assert doubled.wait().tolist() == [2]
        assert work.get_future() is future

    @pytest.mark.parametrize("late", [False, True])
    def test_an_error_is_raised_and_is_none_of_its_values(self, parts, callbacks, late):
        work = GroupWork(Started(parts[:1], [torch.ones(1)]), callbacks)
        future = None if late else work.get_future()
        parts[0].set_exception(PeerLost([1], "died"))
        future = work.get_future() if late else future
        with pytest.raises(RuntimeError, match=r"PeerLost.*lost rank 1"):
            future.wait()

    def test_callbacks_may_wait_for_works_that_come_later(self, callbacks):
        """As those of PowerSGD do: each starts an operation, and blocks until it is complete."""
        first = [concurrent.futures.Future() for _ in range(3)]
        second = [concurrent.futures.Future() for _ in first]
        blocked = threading.Semaphore(0)

        def chained(inner):
            def callback(_):
                blocked.release()
                return GroupWork(Started([inner], [torch.full((1,), 7.0)]), callbacks).get_future().wait()

            return callback

        ends = [
            GroupWork(Started([one], []), callbacks).get_future().then(chained(two))
            for one, two in zip(first, second, strict=True)
        ]
        for one in first:
            one.set_result(None)
        for _ in first:
            assert blocked.acquire(timeout=LIMIT)
        for two in reversed(second):
            two.set_result(None)
        assert [end.wait()[0].item() for end in ends] == [7, 7, 7]


def test_threads_of_callbacks_are_used_again_and_end(callbacks):
    names = []
    for _ in range(5):
        done = threading.Event()
        callbacks.run(lambda done=done: (names.append(threading.get_ident()), done.set()))
        assert done.wait(LIMIT)
        while callbacks._idle == 0:  # it has run the job, and has yet to say that it is free
            pass
    assert len(set(names)) == 1
    (thread,) = [one for one in threading.enumerate() if one.ident == names[0]]
    callbacks.close()
    thread.join(LIMIT)
    assert not thread.is_alive()


class TestErrors:
    def test_one_is_caught_as_ours_and_as_torchs(self):
        lost = as_torch_error(PeerLost([2], "died", addresses={2: "h:1"}))
        assert isinstance(lost, PeerLost)
        assert isinstance(lost, dist.DistBackendError)
        assert (lost.peers, lost.addresses, str(lost)) == (
            {2},
            {2: "h:1"},
            str(PeerLost([2], "died", addresses={2: "h:1"})),
        )
        assert type(lost).__name__ == "PeerLost"
        assert as_torch_error(lost) is lost

    def test_it_pickles_as_ours(self):
        copy = pickle.loads(pickle.dumps(as_torch_error(CollectiveTimeout([1], 2.0))))
        assert type(copy) is CollectiveTimeout
        assert (copy.missing, copy.limit) == ({1}, 2.0)

    def test_a_timeout_names_the_remedy_in_torchs_words(self):
        late = as_torch_error(CollectiveTimeout([1], 2.0))
        assert str(late).endswith("or pass a longer timeout to init_process_group() or new_group().")

    def test_others_stay_what_they_are(self):
        error = ValueError("x")
        assert as_torch_error(error) is error
