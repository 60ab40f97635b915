"""Train with DDP and clipped gradients: in float32, or from the second step on in float16 with a GradScaler.

Targets of the fourth step are so far off that gradients overflow when they are scaled. Prints the digest of the
weights, the norms of gradients, and the number of steps that changed weights.
"""

import hashlib
import json
import sys

import torch
from torch import nn


def main(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled")
    norms, num_changed = [], 0
    for step in range(8):
        images, targets = torch.randn(8, 16), torch.randn(8, 4) * (1e4 if step == 3 else 1.0)
        before = [each.clone() for each in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=kind == "scaled" and step > 0):
            loss = nn.functional.mse_loss(model(images).float(), targets)
        if kind == "scaled" and step > 0:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 2.0)))
        if kind == "scaled" and step > 0:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        num_changed += any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    torch.distributed.destroy_process_group()
    print(json.dumps({"weights": hashlib.sha256(weights).hexdigest(), "norms": norms, "num_changed": num_changed}))


if __name__ == "__main__":
    main(sys.argv[1])
