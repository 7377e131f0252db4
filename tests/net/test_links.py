"""Local and node ranks from host identities."""

from asynccoll.net.links import Links


def test_ranks_are_numbered_within_their_host_and_hosts_by_their_lowest_rank():
    links = Links(0, 5, bytes(16), hosts={0: "b", 1: "a", 2: "b", 3: "a", 4: "c"})
    assert links.node_ranks == {0: 0, 1: 1, 2: 0, 3: 1, 4: 2}
    assert links.local_ranks == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}


def test_the_order_in_which_hosts_were_learned_does_not_matter():
    links = Links(0, 3, bytes(16), hosts={2: "b", 1: "b", 0: "a"})
    assert links.node_ranks == {0: 0, 1: 1, 2: 1}
    assert links.local_ranks == {0: 0, 1: 0, 2: 1}
