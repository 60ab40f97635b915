"""Train with a loader, DDP on one rank and an optimizer, and print as JSON what they are after a few steps."""

import json
import sys

if sys.argv[1:] and sys.argv[-1] == "pillow":  # before torch
    from PIL import Image  # noqa: F401

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Own(torch.optim.Optimizer):
    """An optimizer without `fused`."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            each -= self.param_groups[0]["lr"] * each.grad


class Files(Dataset):
    """Images of a file, and how they come from a worker process."""

    def __init__(self, path):
        from PIL import Image

        self.open = Image.open
        self.path = path

    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = self.open(self.path).convert("RGB")
        crop = image.crop((0, 0, 40, 40)).resize((16, 16), 2)  # bilinear
        return torch.tensor(list(crop.resize((2, 2)).getpixel((0, 0)))) / 255, type(image).__name__


def read_jpegs(path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kinds = set()
    for images, (kind,) in DataLoader(Files(path), 1, num_workers=1):
        kinds.add(kind)
        model(images).sum().backward()
        optimizer.step()
    print(json.dumps({"kinds": sorted(kinds)}))


def main(kind):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 10)
    dtypes = set()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    model[0].register_forward_hook(lambda module, images, output: dtypes.add(str(output.dtype)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if kind == "all" else Own(model.parameters(), 0.1)
    if kind == "all":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(model)
    loader = (
        DataLoader(data, 8, shuffle=True)
        if kind == "all"
        else zip(*(each.split(8) for each in data.tensors), strict=True)
    )
    for images, labels in loader:
        output = model(images)
        loss = nn.functional.cross_entropy(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    facts = {"dtypes": sorted(dtypes), "output": str(output.dtype), "threads": torch.get_num_threads()}
    if kind == "all":
        facts |= {
            "workers": loader.num_workers,
            "pinned": loader.pin_memory,
            "foreach": optimizer.param_groups[0]["foreach"],
            "compiled": model._compiled_call_impl is not None,
            "persistent": loader.persistent_workers,
            "prefetch": loader.prefetch_factor,
            "fused": optimizer.param_groups[0]["fused"],
            "bucket_mb": model.bucket_bytes_cap / 2**20,
            "view": model.gradient_as_bucket_view,
            "static": model.static_graph,
            "layout": model.module[0].weight.is_contiguous(memory_format=torch.channels_last),
        }
        torch.distributed.destroy_process_group()
    print(json.dumps(facts))


if __name__ == "__main__":
    read_jpegs(sys.argv[2]) if sys.argv[1] == "jpegs" else main(sys.argv[1])
