"""Train with a module, a loader, batches and losses of unusual kinds; print the weights."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def parameters(self):
        return list(super().parameters())

    def forward(self, features, module):
        return self.layer(features) * module


class Batch:
    features = torch.ones(3, 4)

    def shape(self):
        raise NotImplementedError


class ListLoader(DataLoader):
    def _get_iterator(self):
        return iter([Batch()] * 4)  # has no weak references


def main():
    # A world of one rank, as the observer looks at the losses only if there are ranks.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for loader in (ListLoader(range(4)), DataLoader(range(4), collate_fn=lambda _: Batch())):
        for batch in loader:
            losses = [net(batch.features, module=scale).square().mean() for scale in (2.0, 3.0)]
            torch.autograd.backward(iter(losses))
            optimizer.step()
            optimizer.zero_grad()
    torch.distributed.destroy_process_group()
    print(hashlib.sha256(net.layer.weight.detach().numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
