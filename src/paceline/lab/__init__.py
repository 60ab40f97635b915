"""The lab: the trainer run as an experiment, in fresh processes, over variations of one recipe."""
