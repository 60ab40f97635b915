"""Compile a module in each way; print how many graphs were compiled, and the weights."""

import hashlib
import logging

import torch
from torch import nn

GRAPHS = []


def backend(graph, inputs):
    GRAPHS.append(graph)
    return graph.forward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))

    def forward(self, features):
        return self.layers(features)


class Breaking(Net):
    def forward(self, features):
        features = self.layers(features)
        logging.getLogger().warning("a graph break")
        return features * 2


def train(model, parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(4):
        nn.MSELoss()(model(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, 8))
    model.train()


def main():
    torch.manual_seed(0)
    digest = hashlib.sha256()
    counts = []
    for kind in ("wrapped", "in place", "root sequential", "inner", "breaking"):
        GRAPHS.clear()
        torch._dynamo.reset()
        net = Breaking() if kind == "breaking" else Net()
        if kind == "root sequential":
            net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
        model = net
        if kind == "wrapped":
            model = torch.compile(net, backend=backend, fullgraph=True)
        elif kind == "inner":
            net.layers[1].compile(backend=backend, fullgraph=True)
        else:
            net.compile(backend=backend, fullgraph=kind != "breaking")
        train(model, net.parameters())
        counts.append(len(GRAPHS))
        digest.update(b"".join(each.detach().numpy().tobytes() for each in net.state_dict().values()))
    print(counts, digest.hexdigest())


if __name__ == "__main__":
    main()
