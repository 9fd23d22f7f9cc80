"""The two interpreters that a local job consists of: ``python -m memfit.jobs shim|child FOLDER``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    role, folder = sys.argv[1], Path(sys.argv[2])
    if role == "shim":
        from memfit.jobs import _shim

        sys.exit(_shim.main(folder))
    from memfit.jobs import _child

    sys.exit(_child.main(folder))
