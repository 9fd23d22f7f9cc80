"""A graph forecaster of stocks: one model over all assets of a day, trained in purged folds."""
