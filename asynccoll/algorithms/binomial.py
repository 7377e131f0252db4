"""Who is whose parent in a binomial tree. Knows ranks alone; `asynccoll.algorithms.tree` has the picture."""

from __future__ import annotations

__all__ = ["branch", "family"]


def family(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Parent of ``rank`` (None at the root) and its children in sending order: largest subtree first."""
    place = (rank - root) % size
    reach = place & -place or 1 << (size - 1).bit_length()
    parent = (place - reach + root) % size if place else None
    children = []
    while (reach := reach >> 1) > 0:
        if place + reach < size:
            children.append((min(reach, size - place - reach), (place + reach + root) % size))
    # Only the highest subtree can be cut short by the size, so this moves one child at most.
    children.sort(key=lambda child: child[0], reverse=True)
    return parent, [child for _, child in children]


def branch(rank: int, size: int, root: int) -> list[int]:
    """The ranks of the subtree of ``rank`` in the tree of `family`: itself, then its children's, the nearest child first."""
    place = (rank - root) % size
    reach = place & -place or size
    return [(one + root) % size for one in range(place, min(place + reach, size))]
