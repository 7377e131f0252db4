"""One call of each verb, of any size, and what every rank must get of it. Knows no worlds."""

import numpy as np

EXCHANGING = ("gather", "scatter", "alltoall")
REDUCING = ("reduce", "reduce_scatter", "scan", "exscan")
FOLDED = "objects"
"""An allreduce of Python objects, which is no verb of its own."""
VERBS = ("barrier", "allreduce", "allreduce_tree", "broadcast", "allgather", FOLDED, *EXCHANGING, *REDUCING)
ALGORITHMS = {
    "allreduce": ("ring", "tree", "doubling"),
    "reduce": ("ring", "tree"),
    "reduce_scatter": ("ring", "tree"),
    "scan": ("chain", "doubling"),
    "exscan": ("chain", "doubling"),
}
"""Of those verbs for which the algorithm decides who depends on whom."""
CALLS = tuple((verb, algorithm) for verb in VERBS for algorithm in ALGORITHMS.get(verb, (None,)))


def own(comm_rank, count):
    """What a rank brings along: whole numbers, so that sums are exact in any order."""
    return np.arange(float(count)) % 1000 + comm_rank


def start(comm, verb, count, root=0, **options):
    """Call ``verb`` on arrays of ``count`` elements that tell where they come from and, where it matters, where they go."""
    mine, ranks = own(comm.rank, count), range(comm.world_size)
    options = {name: value for name, value in options.items() if value is not None}
    match verb:
        case "barrier":
            return comm.barrier(**options)
        case "broadcast":
            return comm.broadcast(mine if comm.rank == root else None, root, **options)
        case "gather":
            return comm.gather(mine, root, **options)
        case "scatter":
            values = [mine + 1000 * to for to in ranks] if comm.rank == root else None
            return comm.scatter(values, root, **options)
        case "alltoall":
            return comm.alltoall([mine + 1000 * to for to in ranks], **options)
        case "allreduce_tree":
            return comm.allreduce_tree({"w": mine, "n": comm.rank}, **options)
        case "reduce":
            return comm.reduce(mine, root=root, **options)
        case "objects":
            return comm.allreduce([mine.tobytes()], **options)
    return getattr(comm, verb)(mine, **options)


def expected(comm, verb, count, root=0):
    """What `start` gives on that rank."""
    rank, size = comm.rank, comm.world_size
    ranks = range(size)

    def total(of):
        return own(0, count) * len(of) + sum(of)

    match verb:
        case "barrier":
            return None
        case "broadcast":
            return own(root, count)
        case "allgather":
            return [own(other, count) for other in ranks]
        case "gather":
            return [own(other, count) for other in ranks] if rank == root else None
        case "scatter":
            return own(root, count) + 1000 * rank
        case "alltoall":
            return [own(other, count) + 1000 * rank for other in ranks]
        case "allreduce_tree":
            return {"w": total(ranks), "n": sum(ranks)}
        case "objects":
            return [own(other, count).tobytes() for other in ranks]
        case "reduce":
            return total(ranks) if rank == root else None
        case "reduce_scatter":
            return np.array_split(total(ranks), size)[rank]
        case "scan":
            return total(range(rank + 1))
        case "exscan":
            return total(range(rank)) if rank else None
    return total(ranks)


def same(found, right):
    """Equal arrays, lists or dicts of them, or equal objects."""
    if isinstance(right, list | dict):
        keys = range(len(right)) if isinstance(right, list) else right
        return (
            type(found) is type(right)
            and len(found) == len(right)
            and all(same(found[key], right[key]) for key in keys)
        )
    if isinstance(right, np.ndarray):
        return (
            type(found) is np.ndarray
            and (found.dtype, found.shape) == (right.dtype, right.shape)
            and found.tobytes() == right.tobytes()
        )
    return type(found) is type(right) and found == right


def right(comm, verb, count, result, root=0):
    """``result`` is what `start` gives there."""
    return same(result, expected(comm, verb, count, root))
