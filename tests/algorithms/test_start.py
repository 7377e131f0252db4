import pytest

from asynccoll.algorithms.dissemination import partners
from asynccoll.algorithms.start import LINEAR, Graph, graph

SIZES = range(1, 71)


def run(size):
    """Ranks heard, per rank, and the number of records, when every rank does its part as far as it can."""
    parts = [graph(rank, size) for rank in range(size)]
    knows = [{rank} for rank in range(size)]
    heard = [0] * size
    told = [-1] * size
    links = {}
    records = 0
    going = True
    while going:
        going = False
        for rank, part in enumerate(parts):
            if told[rank] < heard[rank]:
                told[rank] += 1
                for peer in part.tells[told[rank]]:
                    links.setdefault((rank, peer), []).append(set(knows[rank]))
                    records += 1
                going = True
            elif heard[rank] < len(part.hears) and links.get((part.hears[heard[rank]], rank)):
                knows[rank] |= links[part.hears[heard[rank]], rank].pop(0)
                heard[rank] += 1
                going = True
    assert heard == [len(part.hears) for part in parts], "a rank waits for ever"
    assert not any(links.values()), "a record that nobody hears"
    return knows, records


@pytest.mark.parametrize("size", SIZES)
def test_at_the_end_every_rank_has_heard_of_all(size):
    knows, _ = run(size)
    assert knows == [set(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
def test_it_takes_as_many_records_as_documented(size):
    _, records = run(size)
    assert records == (2 * (size - 1) if 2 < size <= LINEAR else size * (size - 1).bit_length())


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_hears_each_peer_once_and_never_itself(size):
    for rank in range(size):
        tells, hears = graph(rank, size)
        assert len(set(hears)) == len(hears)
        assert rank not in hears
        assert all(rank not in peers for peers in tells)
        assert len(tells) == len(hears) + 1


@pytest.mark.parametrize("size", [2, 5, 6, 8, 33, 64])
def test_other_sizes_take_the_dissemination_graph(size):
    for rank in range(size):
        pairs = partners(rank, size)
        assert graph(rank, size) == Graph(
            (*((to,) for to, _ in pairs), ()), tuple(source for _, source in pairs)
        )


def test_four_ranks_are_as_drawn():
    assert graph(0, 4) == Graph(((), (), (), (1, 2, 3)), (1, 2, 3))
    assert graph(2, 4) == Graph(((0,), ()), (0,))
