"""Runs the programs of all ranks without an engine, with the worst timing: what is lent is read as late as it can be.

A write to memory that is still lent therefore shows as a wrong result. Knows transfers, not what they mean.
"""

from collections import defaultdict, deque

from asynccoll.engine.transfers import FoldBytes, SendBytes

PIECE = 32
"""Bytes of the first piece of a fold; the second is the rest."""


def execute(programs, favourite=0):
    """Results by rank. ``favourite`` and the ranks after it run as far ahead as they can."""
    size = len(programs)
    links = defaultdict(deque)
    posted = dict.fromkeys(range(size))
    results, ended = [None] * size, set()

    def arrived(source, rank, nbytes):
        """So many bytes of the stream, or None while they are not all there."""
        link = links[source, rank]
        if sum(map(len, link)) < nbytes:
            return None
        taken = bytearray()
        while len(taken) < nbytes:
            data = memoryview(link.popleft())
            room = nbytes - len(taken)
            taken += data[:room]
            if len(data) > room:
                link.appendleft(data[room:])
        return memoryview(taken)

    def advance(rank):
        moved = False
        while rank not in ended:
            try:
                transfer = posted[rank] or next(programs[rank])
            except StopIteration as stop:
                results[rank] = stop.value
                ended.add(rank)
                return True
            posted[rank] = None
            if type(transfer) is SendBytes:
                assert transfer.peer != rank
                links[rank, transfer.peer].append(
                    bytes(transfer.data) if transfer.snapshot else transfer.data
                )
            elif type(transfer) is FoldBytes:
                data = arrived(transfer.peer, rank, transfer.nbytes)
                if data is None:
                    posted[rank] = transfer
                    return moved
                for lo, hi in ((0, PIECE), (PIECE, len(data))):
                    if data[lo:hi]:
                        transfer.fold(lo, data[lo:hi])
            else:
                data = arrived(transfer.peer, rank, len(transfer.into))
                if data is None:
                    posted[rank] = transfer
                    return moved
                transfer.into[:] = data
            moved = True
        return moved

    order = [rank % size for rank in range(favourite, favourite + size)]
    while len(ended) < size:
        # Always the first that can move: the favourite runs ahead of everybody.
        assert any(advance(rank) for rank in order), f"deadlock: {posted}"
    assert not any(links.values()), "bytes were left unread"
    return results
