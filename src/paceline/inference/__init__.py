"""Load trained models, classify images and export models."""
