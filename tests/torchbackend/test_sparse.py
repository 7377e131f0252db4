"""Sums of sparse tensors are what the sums of the dense ones are."""

import pytest

torch = pytest.importorskip("torch")

from asynccoll.torch.sparse import give, store_sum  # noqa: E402

pytestmark = pytest.mark.torch

SUM, MAX = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX


def tensor(rank):
    """Rows 0 to ``rank``, the first of them twice; two of the three dimensions are sparse."""
    places = torch.tensor([[0, *range(rank + 1)], [0] * (rank + 2)])
    return torch.sparse_coo_tensor(
        places, torch.full((rank + 2, 2), 1.0 + rank), (4, 3, 2), check_invariants=True
    )


def test_the_sum_is_that_of_the_dense_tensors_and_every_place_is_there_once():
    ranks = [tensor(rank) for rank in range(3)]
    dense = sum(one.to_dense() for one in ranks)
    for own in ranks:
        store_sum([give(one, SUM) for one in (tensor(rank) for rank in range(3))], own)
        assert own.layout is torch.sparse_coo
        assert torch.equal(own.to_dense(), dense)
        assert own.is_coalesced()
        assert own._nnz() == 3


def test_a_rank_may_have_no_elements():
    nowhere = torch.empty(2, 0, dtype=torch.int64)
    empty = torch.sparse_coo_tensor(nowhere, torch.empty(0, 2), (4, 3, 2), check_invariants=True)
    store_sum([give(empty, SUM), give(tensor(1), SUM)], empty)
    assert torch.equal(empty.to_dense(), tensor(1).to_dense())


def test_only_sums_can_leave_out_what_is_not_there():
    with pytest.raises(NotImplementedError) as refused:
        give(tensor(0), MAX)
    assert "to_dense()" in str(refused.value)


def test_ranks_that_differ_are_all_named():
    other = torch.sparse_coo_tensor(size=(4, 2), check_invariants=True)
    with pytest.raises(ValueError) as refused:
        store_sum([give(tensor(0), SUM), give(other, SUM)], tensor(0))
    assert "rank 0 (4, 3, 2) of torch.float32, 2 dimensions sparse; rank 1 (4, 2) of" in str(refused.value)
