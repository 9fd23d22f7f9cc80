"""Run a command for each row of a JSON file under memfit, as `memfit run --param` does for combinations.

    python benchmarks/_run_rows.py ROWS.json SETTING=VALUE... -- COMMAND

A row is an object whose texts fill the command's placeholders. Prints the run's folder as JSON; exits with its code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from memfit.errors import MemfitError
from memfit.pipeline import Choice, run


def main() -> int:
    at = sys.argv.index("--")
    rows, *settings = sys.argv[1:at]
    choice = Choice(combinations=tuple(json.loads(Path(rows).read_text())))
    try:
        result = run(sys.argv[at + 1 :], choice=choice, overrides=settings)
    except MemfitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps({"run": str(result.path)}))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
