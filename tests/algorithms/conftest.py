"""A numeric interpreter of schedules: all ranks in one memory, unbounded queues, and the worst timing it can think of.

It shares nothing with `asynccoll.algorithms.check`, so that each can find what the other misses.
"""

from collections import Counter, defaultdict, deque
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pytest

from asynccoll.algorithms.steps import Finish, Recv, Send


class Outcome(NamedTuple):
    finals: list  # per rank: its final plane
    rounds: int  # longest chain of messages
    sent: list  # per rank: elements sent
    folds: Counter  # element -> how many times an operand was folded into it, over all ranks


def _execute(schedules, planes, op=np.add, favourite=0):
    """Run the steps of all ranks over ``planes``, a pair (partial, final) of arrays for each rank.

    A lent message is read as late as it can be, when its receiver gets to the `Recv`; and ``favourite`` and the
    ranks after it run as far ahead as they can. So a write to what is still lent shows as a wrong result.
    """
    size = len(schedules)
    links = defaultdict(deque)
    chains, sent, folds = [0] * size, [0] * size, Counter()
    pending = {rank % size: list(schedules[rank % size]) for rank in range(favourite, favourite + size)}

    def advance(rank):
        partial, final = planes[rank]
        steps, done = pending[rank], 0
        for step in steps:
            span = slice(step.lo, step.hi)
            if isinstance(step, Send):
                lent = (final if step.final else partial)[span]
                links[rank, step.peer].append((lent.copy() if step.snapshot else lent, chains[rank] + 1))
                sent[rank] += len(lent)
            elif isinstance(step, Finish):
                final[span] = partial[span]
            elif isinstance(step, Recv):
                if not links[step.peer, rank]:
                    break
                incoming, chain = links[step.peer, rank].popleft()
                chains[rank] = max(chains[rank], chain)
                if step.combine is None:
                    final[span] = incoming
                elif step.combine == "lower":
                    partial[span] = op(incoming, partial[span])
                else:
                    partial[span] = op(partial[span], incoming)
                if step.combine is not None:
                    folds.update(range(step.lo, step.hi))
            done += 1
        del steps[:done]
        return done

    while any(pending.values()):
        # One rank at a time, always the first that can move: the favourite runs ahead of everybody.
        if not any(advance(rank) for rank in pending if pending[rank]):
            raise AssertionError(
                f"deadlock: { ({rank: steps[0] for rank, steps in pending.items() if steps}) }"
            )
    assert not any(links.values()), "messages were left unread"
    return Outcome([final for _, final in planes], max(chains), sent, folds)


@pytest.fixture
def execute():
    return _execute


@pytest.fixture(params=["one memory", "apart"])
def operands(request):
    """Makes planes for a reduction: rank r contributes the text ``"r."`` in each element, so order shows."""

    def make(size, count):
        planes = []
        for rank in range(size):
            partial = np.array([f"{rank}."] * count, object)
            final = partial if request.param == "one memory" else np.array(["unset"] * count, object)
            planes.append((partial, final))
        return planes

    return make


@pytest.fixture
def folded():
    """The text that a fold in rank order gives, from rank ``first`` on and round."""

    def fold(size, first=0):
        return "".join(f"{(first + i) % size}." for i in range(size))

    return fold


@pytest.fixture
def counts():
    """Element counts worth proving at a size. Above 16 ranks a third of them, another third at each size."""

    def choose(size):
        everything = sorted({0, 1, max(0, size - 1), size, 2 * size + 1, size // 2 + 1})
        return everything if size <= 16 else everything[size % 3 :: 3]

    return choose


def _split(lengths):
    """Bounds of parts that lie one after the other."""
    ends = list(accumulate(lengths, initial=0))
    return list(pairwise(ends))


@pytest.fixture
def parts():
    """Bounds of what each rank gets of ``count`` rows of ``inner`` elements, as `numpy.array_split` has it."""

    def make(size, rows, inner=1):
        return _split([len(part) * inner for part in np.array_split(np.arange(rows), size)])

    return make


@pytest.fixture
def owner():
    """Element -> rank whose part it is in, for bounds as `parts` makes them."""

    def of(bounds):
        ranks = [rank for rank, (lo, hi) in enumerate(bounds) for _ in range(hi - lo)]
        return ranks.__getitem__

    return of
