"""Diagnose texts, as files that a job left."""

import tempfile
from pathlib import Path

from memfit.diagnosis import Diagnosis, diagnose


def look(text: str | bytes, *, name: str = "log", sacct: str | None = None, kernel_log: str | None = None) -> Diagnosis:
    """Return the diagnosis of a log, an accounting and a kernel's log; evidence names the files without folders."""
    with tempfile.TemporaryDirectory() as folder:

        def write(name: str, text: str | bytes | None) -> Path | None:
            if text is None:
                return None
            path = Path(folder, name)
            path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
            return path

        log = write(name, text)
        assert log is not None
        return diagnose(log, sacct=write("sacct", sacct), kernel_log=write("kernel", kernel_log))


def proof(found: Diagnosis) -> list[tuple[str, int]]:
    """Return the names of the files and the numbers of the lines that a diagnosis rests on."""
    return [(Path(one.file).name, one.line) for one in found.evidence]
