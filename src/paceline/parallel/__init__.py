"""Launch ranks, connect them, and train one model on all of them: DDP, FSDP and DataParallel."""
