"""Training steps whose peak memory was published, rebuilt on fake tensors: one module for each framework that ran."""
