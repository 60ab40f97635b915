"""Results of experiments (ladder, scaling, tuning, sweep, prediction) and the directory that holds one."""
