"""One rank of a test: join the others, call a script's `run(rank, world_size, folder)`, write the tensors it returns.

python rank.py SCRIPT FOLDER NAME WORLD_SIZE RANK
"""

import runpy
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file


def main(script: str, folder: str, name: str, world_size: str, rank: str) -> None:
    store = dist.FileStore(str(Path(folder, f"{name}.store")), int(world_size))
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size), timeout=timeout)
    run = runpy.run_path(script)["run"]
    tensors = run(int(rank), int(world_size), Path(folder))
    tensors = {key: tensor.detach().contiguous().clone() for key, tensor in tensors.items()}
    save_file(tensors, Path(folder, f"{name}.rank{rank}.safetensors"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    main(*sys.argv[1:])
