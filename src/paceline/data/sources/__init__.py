"""Where samples come from: each source makes the training and the validation split of one data set. Torch-free."""
