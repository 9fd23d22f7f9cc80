"""Faults of the frameworks that the moments show, each with its line in the version that is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One fault, as its maintainers would need it.

    Attributes:
        framework: As on the command line.
        file: Within the package, with its first name.
        code: The line that is to blame, or begins what is, without its indentation.
        what: What happens, and what would be right.
        moments: The moments that show it.
    """

    framework: str
    file: str
    code: str
    what: str
    moments: Sequence[str]

    def line(self) -> int | None:
        """Return the number of the line in the installed version, or None if it is not there any more."""
        package, _, rest = self.file.partition("/")
        spec = importlib.util.find_spec(package)
        lines = (Path(str(spec and spec.origin)).parent / rest).read_text(encoding="utf-8").splitlines()
        return next((number for number, line in enumerate(lines, 1) if line.strip() == self.code), None)


FAULTS = (
    Fault(
        "huggingface",
        "transformers/trainer.py",
        "# need to sync after if we skipped the batches in `get_batch_samples` for shuffle order reason",
        "The random state is loaded after the first batches of the resumed epoch were collated. A collator that draws "
        "from the global generators draws other masks than in the unbroken training. The state that is saved is also "
        "one batch ahead, because accelerate's loader looks one batch ahead.",
        ("7", "39", "59"),
    ),
    Fault(
        "huggingface",
        "transformers/trainer_utils.py",
        "def get_last_checkpoint(folder):",
        "The newest checkpoint is the one with the highest number in its name. One that a kill has torn is taken, and "
        "each resume crashes; the older whole ones are not tried.",
        ("19", "51", "52"),
    ),
    Fault(
        "huggingface",
        "transformers/trainer.py",
        "if checkpoint_file_exists and os.path.isfile(os.path.join(checkpoint, SCHEDULER_NAME)):",
        "A checkpoint without optimizer.pt is resumed with a fresh optimizer, without a warning.",
        ("53",),
    ),
    Fault(
        "huggingface",
        "transformers/trainer_utils.py",
        "def compare_trainer_and_checkpoint_args(training_args, trainer_state):",
        "Only the logging, evaluation and save steps and the batch size are compared, and a difference is a warning. "
        "Other data give another stream; a new learning rate is replaced by the old one, without an error.",
        ("61", "61b", "61c"),
    ),
    Fault(
        "huggingface",
        "transformers/trainer_jit_checkpoint.py",
        "def on_pre_optimizer_step(self, args, state, control, **kwargs):",
        "With enable_jit_checkpoint the checkpoint of SIGTERM is written before the optimizer's step. That step is "
        "made after it and lost, and its batches are collated again with other draws. The unfinished training returns "
        "as a finished one does, so it ends with exit code 0.",
        ("46b",),
    ),
    Fault(
        "huggingface",
        "transformers/trainer_jit_checkpoint.py",
        'sentinel_file = os.path.join(output_dir, checkpoint_folder, "checkpoint-is-incomplete.txt")',
        "This file marks a checkpoint that is being written, and nothing reads it. After a SIGKILL in the save each "
        "resume takes the torn checkpoint and crashes.",
        ("46c",),
    ),
    Fault(
        "lightning",
        "lightning/pytorch/loops/fit_loop.py",
        "if self._combined_loader is not None and (loader_states := self._combined_loader._state_dicts()):",
        "A plain DataLoader has no state in the checkpoint, so the resumed epoch starts again at the first batches of "
        "another order, while the counters go on: some samples come twice and some are never seen. A "
        "warning says that results may be unreliable; the exit code is 0.",
        ("7", "39", "60"),
    ),
    Fault(
        "lightning",
        "lightning/pytorch/trainer/connectors/checkpoint_connector.py",
        "def dump_checkpoint(self, weights_only: Optional[bool] = None) -> dict:",
        "A checkpoint holds no random state, so dropout, masks and order are drawn as at the script's start, also "
        "after a checkpoint at an epoch's end.",
        ("37b",),
    ),
    Fault(
        "lightning",
        "lightning/pytorch/utilities/exceptions.py",
        "class SIGTERMException(SystemExit):",
        "SIGTERM ends an unfinished training with exit code 0, so a scheduler takes it for done.",
        ("46", "46d"),
    ),
    Fault(
        "lightning",
        "lightning/pytorch/trainer/call.py",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "Ctrl-C ends the training with exit code 1 and saves nothing: it cannot be told from a failure.",
        ("49",),
    ),
    Fault(
        "accelerate",
        "accelerate/checkpointing.py",
        "# Only save if we have our custom sampler",
        "The sampler's state is saved for a SeedableRandomSampler in an IterableDatasetShard only. By default the "
        "order of the resumed epoch is drawn anew.",
        ("7", "39"),
    ),
    Fault(
        "accelerate",
        "accelerate/data_loader.py",
        "new_batch_sampler = SkipBatchSampler(batch_sampler, skip_batches=num_batches)",
        "skip_first_batches skips the first batches of that other order, so some samples come twice and some are never "
        "seen.",
        ("7", "39"),
    ),
    Fault(
        "accelerate",
        "accelerate/checkpointing.py",
        "def load_accelerator_state(",
        "A torn folder of save_state cannot be told from a whole one: load_state crashes. Nothing is compared with the "
        "settings of now, and the old learning rate replaces a new one.",
        ("18", "51", "52", "61"),
    ),
)
