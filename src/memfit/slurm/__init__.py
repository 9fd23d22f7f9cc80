"""What Slurm's tools print, as records: ``sacct``, ``scontrol show job``, ``scontrol show node`` and ``sinfo``."""

from memfit.slurm._accounting import Request, Row, parse_request, parse_sacct, parse_seconds
from memfit.slurm._ask import read_accounting
from memfit.slurm._shapes import Limit, parse_node_limits, parse_shapes

__all__ = [
    "Limit",
    "Request",
    "Row",
    "parse_node_limits",
    "parse_request",
    "parse_sacct",
    "parse_seconds",
    "parse_shapes",
    "read_accounting",
]
