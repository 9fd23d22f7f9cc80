"""Choose a vehicle's trajectory from a vocabulary: scenes, teacher table, a training on several ranks, metrics."""
