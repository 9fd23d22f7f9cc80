"""``python -m memfit.cli``."""

from memfit.cli import main

main()
