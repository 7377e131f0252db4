"""Save a checkpoint: all replicas bring their state together, then rank 0 alone writes, and all load the same.

asynccoll run -n 2 examples/adaptdl/checkpoint.py
"""

import collections
import os
import pickle
import tempfile
from pathlib import Path

from asynccoll import collective

RANK, REPLICAS = int(os.environ["ASYNCCOLL_RANK"]), int(os.environ["ASYNCCOLL_WORLD_SIZE"])


class Seen:
    """How often each label has been seen; each replica knows its own share until `sync`."""

    def __init__(self):
        self.before = collections.Counter()
        self.here = collections.Counter()

    def sync(self):
        """A collective: every replica calls it."""
        self.before += collective.allreduce(self.here)
        self.here.clear()

    def save(self, file):
        pickle.dump(self.before, file)

    def load(self, file):
        self.before = pickle.load(file)


def save(states, path):
    """Every replica calls it, because `sync` needs all; the file appears at once and whole."""
    for state in states:
        state.sync()
    if RANK == 0:
        draft = path.with_suffix(".new")
        with draft.open("wb") as file:
            for state in states:
                state.save(file)
        draft.replace(path)
    collective.broadcast(None)  # nobody goes on before the file is there


collective.initialize()
folder = tempfile.TemporaryDirectory() if RANK == 0 else None
path = Path(collective.broadcast(folder and folder.name), "checkpoint")

seen = Seen()
seen.here.update(cat=RANK + 1, dog=1)
save([seen], path)

loaded = Seen()
with path.open("rb") as file:
    loaded.load(file)
assert loaded.before == {"cat": sum(range(1, REPLICAS + 1)), "dog": REPLICAS}
if RANK == 0:
    print(f"all {REPLICAS} replicas loaded {dict(loaded.before)}")

collective.teardown()  # everybody has read it
if folder:
    folder.cleanup()
