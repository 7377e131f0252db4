"""What a communicator remembers: who is where, and what came before its call, within limits."""

import pytest

from asynccoll.engine.group import Group
from asynccoll.errors import ProtocolError


def test_ranks_of_the_group_are_positions_in_its_list():
    group = Group(7, (4, 2, 9), 1, "trainers")
    assert group.index == {4: 0, 2: 1, 9: 2}
    assert (group.size, group.rank, group.name, group.comm) == (3, 1, "trainers", 7)


def test_a_new_group_has_seen_nothing():
    group = Group(0, (0, 1), 0, "world")
    assert group.next_seq == 0
    for record in (group.active, group.early, group.early_bytes, group.lost, group.left):
        assert not record


def test_early_frames_of_one_operation_share_one_record():
    group = Group(0, (0, 1), 0, "world")
    assert group.early_of(3) is group.early_of(3)
    assert group.early_of(3) is not group.early_of(4)
    assert sorted(group.early) == [3, 4]
    assert group.early_of(3).group is group


def test_peers_may_be_65536_operations_ahead_and_not_one_more():
    group = Group(0, (0, 1), 0, "world")
    for seq in range(1 << 16):
        group.early_of(seq)
    group.early_of(5)
    with pytest.raises(ProtocolError, match="more than 65536 operations ahead on 'world'"):
        group.early_of(1 << 16)


def test_32768_operations_may_be_under_way_and_not_one_more():
    group = Group(0, (0, 1), 0, "world")
    group.active.update(dict.fromkeys(range((1 << 15) - 1)))
    assert not group.crowded
    group.active[1 << 15] = None
    assert group.crowded
