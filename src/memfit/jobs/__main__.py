"""The interpreters beside a supervisor: ``python -m memfit.jobs keeper RUN_DIR`` and ``... child FOLDER``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    role, folder = sys.argv[1], Path(sys.argv[2])
    if role == "keeper":
        from memfit.jobs import _keeper

        sys.exit(_keeper.main(folder))
    from memfit.jobs import _child

    sys.exit(_child.main(folder))
