"""A ranker of stocks, trained in purged folds that share one panel; README.md beside this file shows how to run it."""
