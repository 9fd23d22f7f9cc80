"""Find results that are not what was saved. A host reads each output once, and again when a file of it changed."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError, DataError
from memfit.pipeline._manifest import hash_output, identity_of
from memfit.rundir import EventTail, RunDir

Count = Callable[[int], None]
HOST = socket.gethostname()


class Proofs:
    """The hashes of outputs as this host read them, by the identities of their files.

    They lie in the run directory, one file for each host, which the run's supervisor alone writes. Those of earlier
    runs count too, because a new run links their results. With ``anew`` none counts. ``looked`` has the manifests that
    are not looked at again.
    """

    def __init__(self, run: RunDir, earlier: Sequence[RunDir], *, anew: bool) -> None:
        *others, self._path = (one.path / "verified" / f"{HOST}.jsonl" for one in (*reversed(earlier), run))
        known = [] if anew else [one for path in (*others, self._path) for one in EventTail(path).read()]
        self._known = {str(one.get("identity")): str(one.get("sha256")) for one in known}
        self._anew, self.looked = anew, set[Path]()

    def why_damaged(self, manifest: Path, made: Mapping[str, Any], count: Count | None = None) -> str | None:
        """Return which output of a result is not what was saved; empty if all are.

        Reads what this host has not read, and tells ``count`` how many bytes. Without it nothing is read, and the
        answer is None where that is needed.
        """
        if count is None and manifest in self.looked:
            return ""
        for output in made["outputs"]:
            path = manifest.with_suffix("") / output["path"]
            try:
                if (found := self._hash(path, output, made.get("host"), count)) is None:
                    return None
                if found != output["sha256"]:
                    return f"{path} is damaged: it is not what {made['job']} saved"
            except DamagedError as error:  # a panel
                return f"{path} is damaged: {error.what}"
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return f"{path} is gone"
                raise DataError(
                    f"{path} cannot be read: {error.strerror}.",
                    rule="a result is compared with its hash before a job reads it.",
                    remedy="see to its disk or network drive, then give the same command again",
                ) from error
        self.looked.add(manifest)
        return ""

    def _hash(self, path: Path, output: Mapping[str, Any], host: object, count: Count | None) -> str | None:
        identity = identity_of(path)
        if identity in self._known:
            return self._known[identity]
        if host == HOST and output.get("identity") == identity and not self._anew:
            return str(output["sha256"])  # hashed here when it was made
        if count is None:
            return None
        found = hash_output(path, count)
        if identity_of(path) != identity:
            return "it is being written"
        self._known[identity] = found
        with suppress(OSError):  # on a full disk it is read again
            self._path.parent.mkdir(exist_ok=True)
            with open(self._path, "a") as file:
                file.write(json.dumps({"identity": identity, "sha256": found}) + "\n")
        return found
