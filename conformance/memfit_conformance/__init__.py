"""Stop a training at each of 64 moments, resume it, and compare it with one that was not stopped."""
