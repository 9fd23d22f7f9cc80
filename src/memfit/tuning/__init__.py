"""Search a workload's settings: each trial is a graph of stages, and all trials run under one memory budget."""
