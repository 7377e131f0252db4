"""A plain DistributedDataParallel script: a small network on scikit-learn's handwritten digits, on the CPU.

    torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py
    torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py --backend gloo

Nothing in it is asynccoll's: the backend is a string, and torch finds it by itself. Both lines print the same accuracy, and the
same digest of the weights.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def datasets(test_share=0.2):
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = int(len(images) * (1 - test_share))
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="asynccoll", help="of the process group (default asynccoll)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images (default 10)")
    parser.add_argument("--batch", type=int, default=32, help="images for each rank and step (default 32)")
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = datasets()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, arguments.batch, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2d}  loss {float(total) / dist.get_world_size():.4f}")
    with torch.no_grad():
        images, labels = test.tensors
        right = int((model(images).argmax(1) == labels).sum())
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
    if dist.get_rank() == 0:
        print(f"accuracy {right / len(labels):.1%} on {len(labels)} images that it has not seen")
        print(
            f"weights {digests[0]} on {len(digests)} ranks, {'all the same' if len(set(digests)) == 1 else digests}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
