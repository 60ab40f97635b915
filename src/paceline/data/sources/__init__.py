"""Sources of samples: each builds the training and validation split of one data set. Torch-free."""
