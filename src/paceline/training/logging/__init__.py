"""Log sinks: files, TensorBoard, and experiment trackers."""
