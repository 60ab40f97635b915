"""Train with DDP on gloo in phases of 8 steps, in each with one rank late in another stage; print the weights."""

import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATE_RANK, LATE_S, STEPS = 1, 0.02, 8
PHASES = ("none", "data_wait", "forward", "backward", "no_sync")


class Net(nn.Module):
    def __init__(self, late_stage):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))
        self.late_stage = late_stage
        if late_stage == "backward":
            self.layers[0].weight.register_hook(lambda gradient: time.sleep(LATE_S))

    def forward(self, images):
        if self.late_stage == "forward":
            time.sleep(LATE_S)
        return self.layers(images)


class Images(TensorDataset):
    late_s = 0.0

    def __getitems__(self, indices):
        time.sleep(self.late_s)
        return [super(Images, self).__getitem__(index) for index in indices]


def train(phase):
    late_stage = phase if dist.get_rank() == LATE_RANK else ""
    data = Images(torch.randn(STEPS * 16, 3, 16, 16), torch.arange(STEPS * 16) % 10)
    data.late_s = LATE_S if late_stage == "data_wait" else 0.0
    net = Net(late_stage)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for images, labels in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
        if phase == "no_sync":
            with model.no_sync():
                nn.functional.cross_entropy(model(images), labels).backward()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return b"".join(each.numpy().tobytes() for each in net.state_dict().values())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digest = hashlib.sha256(b"".join(map(train, PHASES)))
    if dist.get_rank() == 0:
        print(digest.hexdigest())
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and one that frees a tensor while the interpreter ends aborts the process:
    # https://github.com/pytorch/pytorch/issues/190489
    time.sleep(0.5)


if __name__ == "__main__":
    main()
