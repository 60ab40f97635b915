"""The networks: our own, torchvision's and timm's, built from a recipe's `model` section."""
