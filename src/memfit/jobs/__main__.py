"""The processes beside a supervisor: ``python -m memfit.jobs shim RUN_DIR --job ID`` and ``... child FOLDER``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["shim", run_dir, "--job", job_id]:
            from memfit.jobs import _shim

            sys.exit(_shim.main(Path(run_dir) / "jobs" / job_id))
        case ["child", folder]:
            from memfit.jobs import _child

            sys.exit(_child.main(Path(folder)))
        case _:
            sys.exit(__doc__)
