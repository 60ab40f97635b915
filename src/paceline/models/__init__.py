"""Models: built-in networks, and torchvision's, timm's and plugins'."""
