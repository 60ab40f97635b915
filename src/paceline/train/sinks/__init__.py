"""Where the numbers of a run go, each to one place: files, TensorBoard, and trackers of experiments."""
