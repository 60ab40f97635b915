"""Quote the speed, time, memory and cost of training on GPUs from the architecture of the network alone."""
