"""What Slurm's tools print, as records: ``sacct``, ``scontrol show job``, ``scontrol show node`` and ``sinfo``."""

from memfit.slurm._accounting import Request, Row, full_state, parse_request, parse_sacct, parse_seconds, parse_size
from memfit.slurm._ask import read_accounting
from memfit.slurm._shapes import Limit, Shape, parse_node_limits, parse_shapes

__all__ = [
    "Limit",
    "Request",
    "Row",
    "Shape",
    "full_state",
    "parse_node_limits",
    "parse_request",
    "parse_sacct",
    "parse_seconds",
    "parse_shapes",
    "parse_size",
    "read_accounting",
]
