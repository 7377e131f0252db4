"""What a rank tells of an exception, and what is raised for it."""

import io
import pickle

import pytest

from asynccoll.errors import PeerLost, RemoteError
from asynccoll.launch import Exit
from asynccoll.launch.reports import describe, lost, pickler, raise_first


def failure(error, when=None):
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 (described)
        described = describe(caught)
    return described if when is None else described._replace(when=when)


class NoPickle(Exception):
    def __reduce__(self):
        raise TypeError("not this one")


def test_the_earliest_failure_is_raised_with_its_rank():
    failures = {0: failure(KeyError("late"), 2.0), 3: failure(ValueError("early"), 1.0)}
    with pytest.raises(ValueError, match="early") as caught:
        raise_first(failures, 4, "launch", 1.5)
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 3 of 4 by launch()\n\n")


def test_what_has_no_pickle_is_a_remote_error_with_type_message_and_traceback():
    with pytest.raises(RemoteError) as caught:
        raise_first({1: failure(NoPickle("odd"))}, 2, "local", 0.1)
    assert caught.value.origin == 1
    assert "NoPickle" in str(caught.value)
    assert "odd" in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_not_of_the_kind_to_raise_is_a_remote_error(error):
    with pytest.raises(RemoteError, match=type(error).__name__):
        raise_first({0: failure(error)}, 1, "local", 0.1, Exception)
    with pytest.raises(type(error)):
        raise_first({0: failure(error)}, 1, "launch", 0.1)


def test_a_lost_rank_is_named_with_its_end():
    error = lost(Exit(2, 77, 3, 1.0), 4, "local", "while it worked")
    assert isinstance(error, PeerLost)
    assert error.peers == {2}
    assert "rank 2 of 4 exited with code 3 (pid 77) while it worked" in str(error)


def test_functions_keep_their_file_names():
    file = io.BytesIO()
    pickler(file).dump(lambda: None)
    assert pickle.loads(file.getvalue()).__code__.co_filename == __file__
