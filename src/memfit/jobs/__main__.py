"""The processes beside a supervisor.

python -m memfit.jobs shim RUN_DIR --job ID [--lock DESCRIPTOR]
python -m memfit.jobs shim RUN_DIR --array FILE    one element of a Slurm array
python -m memfit.jobs shim FOLDER --node              the part of such a job for this node
python -m memfit.jobs child FOLDER [PLACE]            a function; its result goes into the folder, or behind this path
python -m memfit.jobs ranks FOLDER                    the agent of a job of several ranks
python -m memfit.jobs warm DESCRIPTOR PID             what jobs are forked from, for the run of that process
"""

import sys
from pathlib import Path


def main(words: list[str]) -> int:
    """Be the process that these words name; return its exit code, if nothing of the user's has to end."""
    match words:
        case ["shim", run_dir, "--job", job_id, *lock] if lock[:1] in ([], ["--lock"]):
            from memfit.jobs import _shim

            return _shim.main(Path(run_dir) / "jobs" / job_id, *map(int, lock[1:2]))
        case ["shim", run_dir, "--array", file]:
            from memfit.jobs import _shim

            return _shim.run_element(Path(run_dir), Path(file))
        case ["shim", folder, "--node"]:
            from memfit.jobs import _shim

            return _shim.run_node(Path(folder))
        case ["child", folder, *place] if len(place) < 2:
            from memfit.jobs import _child

            sys.exit(_child.main(Path(folder), *place))
        case ["ranks", folder]:
            from memfit.jobs import _ranks

            return _ranks.run_ranks(Path(folder))
        case ["warm", descriptor, run_pid]:
            from memfit.jobs import _warm

            return _warm.serve(int(descriptor), int(run_pid))
    sys.exit(__doc__)


if __name__ == "__main__":
    from memfit.jobs._fork import leave

    leave(main(sys.argv[1:]))
