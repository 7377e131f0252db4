"""Each form in which torch lets a group's method be called reaches the same operation."""

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from asynccoll.torch.collectives import Collectives  # noqa: E402
from asynccoll.torch.forms import Forms  # noqa: E402

c10d = torch.distributed.distributed_c10d

pytestmark = pytest.mark.torch

T = torch.ones(2)
TWO = timedelta(seconds=2)
MAX = torch.distributed.ReduceOp.MAX


def options(kind, **values):
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def call(monkeypatch, method, *args, **kwargs):
    """What the operation below is called with: the tensors, and the values of its options."""
    came = []
    monkeypatch.setattr(Collectives, method, lambda self, *given: came.append(given))
    getattr(Forms(), method)(*args, **kwargs)
    ((*tensors, opts),) = came
    return tensors, opts


@pytest.mark.parametrize(
    "form",
    [
        lambda: ([T], options(c10d.AllreduceOptions, reduceOp=MAX, timeout=TWO)),
        lambda: ([T], MAX, TWO),
        lambda: (T, MAX, TWO),
    ],
)
def test_allreduce(form, monkeypatch):
    (tensors,), opts = call(monkeypatch, "allreduce", *form())
    assert tensors[0] is T
    assert isinstance(opts, c10d.AllreduceOptions)
    assert (opts.reduceOp, opts.timeout) == (MAX, TWO)


def test_without_options_it_is_the_sum_to_rank_0(monkeypatch):
    _, opts = call(monkeypatch, "reduce", T)
    assert (opts.reduceOp, opts.rootRank) == (torch.distributed.ReduceOp.SUM, 0)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([T], options(c10d.ReduceOptions, rootRank=2, reduceOp=MAX)), {}),
        ((T, 2, MAX), {}),
        ((T,), {"root": 2, "op": MAX}),
    ],
)
def test_reduce(args, kwargs, monkeypatch):
    (tensors,), opts = call(monkeypatch, "reduce", *args, **kwargs)
    assert tensors[0] is T
    assert (opts.rootRank, opts.reduceOp) == (2, MAX)


@pytest.mark.parametrize("method", ["broadcast", "gather", "scatter"])
def test_a_root_in_the_place_of_options(method, monkeypatch):
    given = {"broadcast": (T,), "gather": ([T, T], T), "scatter": (T, [T, T])}[method]
    tensors, opts = call(monkeypatch, method, *given, 1, TWO)
    wanted = {"broadcast": [[T]], "gather": [[[T, T]], [T]], "scatter": [[T], [[T, T]]]}[method]
    assert str(tensors) == str(wanted)
    assert (opts.rootRank, opts.timeout) == (1, TWO)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("allgather", ([T, T], T)),
        ("all_to_all_single", (T, T, [], [])),
        ("barrier", ()),
    ],
)
def test_a_limit_in_the_place_of_options(method, given, monkeypatch):
    for args, kwargs in (((TWO,), {}), ((), {"timeout": TWO})):
        _, opts = call(monkeypatch, method, *given, *args, **kwargs)
        assert opts.timeout == TWO


def test_older_names_are_the_same_methods():
    assert Forms._allgather_base is Forms.all_gather_single
    assert Forms._reduce_scatter_base is Forms.reduce_scatter_single
    assert Forms.alltoall_base is Forms.all_to_all_single
