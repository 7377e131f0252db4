"""Data-parallel training that awaits its gradients: a small network on scikit-learn's handwritten digits.

    asynccoll run -n 4 examples/train_digits.py

Every rank computes the gradients of its share of each batch, starts their reduction with ``comm.allreduce_tree``, prepares the next
batch while it runs, and then takes the step. All ranks end with the same bits; rank 0 trains once more on its own to compare.
"""

import argparse
import hashlib
import sys

import numpy as np
from sklearn.datasets import load_digits

import asynccoll

CLASSES, PIXELS, SIDE = 10, 64, 8


def load(test_share=0.2, seed=0):
    """The 1,797 images as (train images, train labels, test images, test labels); the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order] / 16.0, labels[order]
    cut = int(len(images) * (1 - test_share))
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def new_model(hidden, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(0, (2 / PIXELS) ** 0.5, (PIXELS, hidden)),
        "b1": np.zeros(hidden),
        "w2": rng.normal(0, (1 / hidden) ** 0.5, (hidden, CLASSES)),
        "b2": np.zeros(CLASSES),
    }


def forward(model, images):
    hidden = np.maximum(images @ model["w1"] + model["b1"], 0)
    logits = hidden @ model["w2"] + model["b2"]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, weights / weights.sum(axis=1, keepdims=True)


def gradients(model, images, labels):
    """Sums over the images (not means), so that adding up the ranks' shares gives the whole batch's."""
    hidden, chances = forward(model, images)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels] + 1e-12).sum()
    chances[rows, labels] -= 1
    back = (chances @ model["w2"].T) * (hidden > 0)
    return {
        "w1": images.T @ back,
        "b1": back.sum(axis=0),
        "w2": hidden.T @ chances,
        "b2": chances.sum(axis=0),
        "loss": float(loss),
    }


def batch_of(images, labels, step, epoch_steps, batch, rank, size):
    """This rank's share of a batch, each image moved sideways by up to a pixel: drawn for the whole batch, alike on all ranks."""
    epoch, number = divmod(step, epoch_steps)
    order = np.random.default_rng((1, epoch)).permutation(len(images))[number * batch : (number + 1) * batch]
    shifts = np.random.default_rng((2, step)).integers(-1, 2, len(order))
    share = np.array_split(np.arange(len(order)), size)[rank]
    squares = images[order[share]].reshape(-1, SIDE, SIDE)
    moved = [np.roll(square, shift, axis=1) for square, shift in zip(squares, shifts[share], strict=True)]
    return np.array(moved).reshape(-1, PIXELS), labels[order[share]], len(order)


async def train(comm, data, options, report):
    """Train on all ranks of ``comm``; the model, equal on each of them. ``report(step, loss)`` is called after each step."""
    images, labels, _, _ = data
    model = new_model(options.hidden)
    velocity = {name: np.zeros_like(weights) for name, weights in model.items()}
    epoch_steps = len(images) // options.batch
    steps = options.epochs * epoch_steps

    def batch(step):
        return batch_of(images, labels, step, epoch_steps, options.batch, comm.rank, comm.world_size)

    share, answers, total = batch(0)
    for step in range(steps):
        work = comm.allreduce_tree(gradients(model, share, answers), name="gradients")
        if step + 1 < steps:
            upcoming = batch(step + 1)  # while the gradients are on their way
        gradient = await work
        rate = options.rate * (1 - step / steps)
        for name, weights in model.items():
            velocity[name] = 0.9 * velocity[name] - rate * gradient[name] / total
            weights += velocity[name]
        report(step, gradient["loss"] / total)
        share, answers, total = upcoming
    return model


def accuracy(model, data):
    _, _, images, labels = data
    return float((forward(model, images)[1].argmax(axis=1) == labels).mean())


def digest(model):
    return hashlib.sha256(b"".join(weights.tobytes() for weights in model.values())).hexdigest()


class Progress:
    """A rich progress bar on a terminal, a line now and then elsewhere, and nothing on ranks other than 0."""

    def __init__(self, comm, steps):
        self.steps, self.bar = steps, None
        self.quiet = comm.rank != 0
        if not self.quiet:
            from rich.console import Console
            from rich.progress import Progress as Bar

            console = Console()
            if console.is_terminal:
                self.bar = Bar(console=console)
                self.task = self.bar.add_task("training", total=steps)

    def __enter__(self):
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_):
        if self.bar:
            self.bar.stop()

    def __call__(self, step, loss):
        if self.bar:
            self.bar.update(self.task, completed=step + 1, description=f"training, loss {loss:.3f}")
        elif not self.quiet and (step + 1) % max(1, self.steps // 5) == 0:
            print(f"step {step + 1}/{self.steps}, loss {loss:.3f}", flush=True)


async def main(options):
    data = load()
    steps = options.epochs * (len(data[0]) // options.batch)
    async with asynccoll.init() as comm:
        with Progress(comm, steps) as report:
            model = await train(comm, data, options, report)
        hashes = await comm.allgather(digest(model))
        if comm.rank != 0:
            return 0
        score = accuracy(model, data)
        print(f"{comm.world_size} ranks, {steps} steps: test accuracy {score:.4f}")
        print(f"weights: {len(set(hashes))} hash on {len(hashes)} ranks, {hashes[0][:16]}")
    # The same training in one process, to compare.
    async with asynccoll.connect(rank=0, world_size=1) as alone:
        reference = await train(alone, data, options, lambda step, loss: None)
    apart = max(float(np.abs(model[name] - reference[name]).max()) for name in model)
    print(f"one process: largest difference of a weight {apart:.2e}")
    return 0 if score >= 0.95 and len(set(hashes)) == 1 and apart <= 1e-5 else 1


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks (default 64)")
    parser.add_argument("--hidden", type=int, default=96, help="hidden units (default 96)")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate at the start (default 0.2)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asynccoll.run(main(parse())))
