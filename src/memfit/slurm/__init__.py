"""Slurm's tools: what they print, as records, and calls that submit, ask and cancel."""

from memfit.slurm._accounting import Row, parse_request, parse_sacct, parse_seconds
from memfit.slurm._control import (
    Element,
    NoAnswerError,
    cancel_elements,
    check_script,
    find_job,
    parse_nodes,
    parse_queue,
    read_accounting,
    read_ends,
    read_largest_node,
    read_queue,
    release_element,
    submit_script,
)
from memfit.slurm._shapes import Limit, format_time, parse_node_limits, parse_shapes

__all__ = [
    "Element",
    "Limit",
    "NoAnswerError",
    "Row",
    "cancel_elements",
    "check_script",
    "find_job",
    "format_time",
    "parse_node_limits",
    "parse_nodes",
    "parse_queue",
    "parse_request",
    "parse_sacct",
    "parse_seconds",
    "parse_shapes",
    "read_accounting",
    "read_ends",
    "read_largest_node",
    "read_queue",
    "release_element",
    "submit_script",
]
