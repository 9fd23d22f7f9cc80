"""Slurm's tools: what they print, as records, calls that submit, ask and cancel, and batch scripts."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.slurm._accounting import Row as Row
    from memfit.slurm._accounting import parse_request as parse_request
    from memfit.slurm._accounting import parse_sacct as parse_sacct
    from memfit.slurm._accounting import parse_seconds as parse_seconds
    from memfit.slurm._batch_script import MEMORY_OPTIONS as MEMORY_OPTIONS
    from memfit.slurm._batch_script import BatchScript as BatchScript
    from memfit.slurm._batch_script import Setting as Setting
    from memfit.slurm._batch_script import parse_script as parse_script
    from memfit.slurm._batch_script import read_script as read_script
    from memfit.slurm._control import Element as Element
    from memfit.slurm._control import LargestNode as LargestNode
    from memfit.slurm._control import NoAnswerError as NoAnswerError
    from memfit.slurm._control import cancel_elements as cancel_elements
    from memfit.slurm._control import check_script as check_script
    from memfit.slurm._control import find_job as find_job
    from memfit.slurm._control import parse_nodes as parse_nodes
    from memfit.slurm._control import parse_queue as parse_queue
    from memfit.slurm._control import read_accounting as read_accounting
    from memfit.slurm._control import read_ends as read_ends
    from memfit.slurm._control import read_largest_node as read_largest_node
    from memfit.slurm._control import read_queue as read_queue
    from memfit.slurm._control import release_element as release_element
    from memfit.slurm._control import submit_script as submit_script
    from memfit.slurm._shapes import Limit as Limit
    from memfit.slurm._shapes import format_time as format_time
    from memfit.slurm._shapes import parse_node_limits as parse_node_limits
    from memfit.slurm._shapes import parse_shapes as parse_shapes

__getattr__, __dir__ = load_lazily(__name__)
