"""Slurm's tools: calls that submit, ask and cancel. `memfit.diagnosis` reads what people paste of them."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.slurm._control import Element as Element
    from memfit.slurm._control import LargestNode as LargestNode
    from memfit.slurm._control import NoAnswerError as NoAnswerError
    from memfit.slurm._control import cancel_elements as cancel_elements
    from memfit.slurm._control import find_job as find_job
    from memfit.slurm._control import format_time as format_time
    from memfit.slurm._control import read_accounting as read_accounting
    from memfit.slurm._control import read_ends as read_ends
    from memfit.slurm._control import read_largest_node as read_largest_node
    from memfit.slurm._control import read_queue as read_queue
    from memfit.slurm._control import release_element as release_element
    from memfit.slurm._control import submit_script as submit_script

__all__ = []

__getattr__, __dir__ = load_lazily(__name__)
