"""Sources of samples: each module builds the training and validation split of one kind of dataset. Torch-free."""
