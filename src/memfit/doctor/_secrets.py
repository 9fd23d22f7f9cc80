"""Find keys and passwords in a folder's files and in its git history. detect-secrets judges; no value is printed."""

from __future__ import annotations

import re
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memfit.checks import Check, worst_first
from memfit.doctor._case import judge
from memfit.errors import MissingExtraError, UsageError
from memfit.masking import FORMS, load_finders
from memfit.units import format_count

_MOST_BYTES = 4 << 20  # a longer file is data, and is counted as not read
_REASON = "whoever reads the file, an image that holds it or the history has the key"
_OF_FILE = "revoke the key, and write the name of a variable there instead"
_OF_HISTORY = "revoke the key: who has a clone has it, even if git filter-repo takes it out of the history"
_LOG = ("log", "--all", "-m", "-p", "-U0", "--no-color", "--no-renames", "--no-ext-diff", "--no-textconv")


def scan_secrets(folder: Path, progress: Callable[[int, int], None] | None = None) -> list[Check]:
    """Return what is wrong with the secrets of a folder of git: its files, its history, its ``.env``.

    A value on a line with the comment ``pragma: allowlist secret`` is left out, in the history too.

    Args:
        folder: A folder inside a git repository; all of the repository is read.
        progress: Called with the number of files and commits read, and how many there are.

    Raises:
        MissingExtraError: If detect-secrets is not installed.
        UsageError: If the folder is in no git repository.
    """
    if not load_finders():
        raise MissingExtraError.of("detect-secrets", "integrations", "memfit doctor --secrets")
    from detect_secrets.settings import transient_settings

    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
    except (subprocess.CalledProcessError, OSError):
        raise UsageError(
            f"{folder} is in no git repository.",
            rule="doctor --secrets reads the files that git knows or would add, and their history.",
            remedy="run it inside the repository",
        ) from None
    _add_finders()
    with transient_settings({"plugins_used": [{"name": one.__name__} for one in load_finders()]}):
        return worst_first([*_scan(root, progress or (lambda done, total: None)), *_env_file(root)])


def _add_finders() -> None:
    """Make detect-secrets find what `mask` knows by its form and it does not."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import BasePlugin

    for kind, kept, secret in FORMS:

        def find(self: Any, string: str, form: str = f"(?:{kept})({secret})") -> list[str]:
            return re.findall(form, string)

        if kind:
            finder: Any = type(kind, (BasePlugin,), {"secret_type": kind, "analyze_string": find})
            get_mapping_from_secret_type_to_class()[kind] = finder


def _scan(root: Path, progress: Callable[[int, int], None]) -> Iterator[Check]:
    """Scan the files, then each commit's new lines; a secret counts once, at the first place it is found."""
    names = [one for one in _git(root, "ls-files", "-z", "-co", "--exclude-standard").split("\0") if one]
    commits = _git(root, "rev-list", "--all").split()
    known, total, num_unread, num_found = set[tuple[str, str]](), len(names) + len(commits), 0, 0
    for done, name in enumerate(names):
        progress(done, total)
        path = root / name
        if path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size > _MOST_BYTES:
            num_unread += 1
            continue
        for kind, line in _new_in(path, known):
            num_found += 1
            yield judge("secrets", f"{kind} in {name}:{line}", _REASON, _OF_FILE, "files", problem=True)
    if not num_found:
        told = f"; {num_unread} too large to read" if num_unread else ""
        yield judge("secrets", f"no secret in {format_count(len(names), 'file')}{told}", _REASON, "", "files")
    is_well = True
    with tempfile.TemporaryDirectory() as scratch:
        for done, commit, name, added in _history(root):
            progress(len(names) + done, total)
            path = Path(scratch, Path(name).name)  # the kind of file decides how a line is read
            path.write_text("\n".join(added) + "\n")
            for kind, _ in _new_in(path, known):
                is_well, found = False, f"{kind} in {name} in commit {commit}"
                yield judge("secrets", found, _REASON, _OF_HISTORY, "git history", problem=True)
            path.unlink()
    if is_well:
        told = f"no {'other ' if num_found else ''}secret in {format_count(len(commits), 'commit')}"
        yield judge("secrets", told, _REASON, "", "git history")


def _new_in(path: Path, known: set[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    """Yield type and line of each secret of a file that is not known yet; those that are allowed become known."""
    from detect_secrets.core.scan import scan_file, scan_for_allowlisted_secrets_in_file

    if b"allowlist secret" in path.read_bytes():
        known.update((one.type, one.secret_hash) for one in scan_for_allowlisted_secrets_in_file(str(path)))
    for one in list(scan_file(str(path))):
        if (key := (one.type, one.secret_hash)) not in known:
            known.add(key)
            yield one.type, one.line_number


def _history(root: Path) -> Iterator[tuple[int, str, str, list[str]]]:
    """Yield for each file of each commit the number and the name of the commit, the file, and its new lines.

    Each line of a kind of file is there once.
    """
    read, done, commit, name, added = set[tuple[str, str]](), 0, "", "", list[str]()
    command = ["git", "-c", "core.quotepath=off", *_LOG, "--format=%x00commit %h"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, errors="replace") as git:
        for line in git.stdout or ():
            if line.startswith(("\0commit ", "+++ ")):
                if added:
                    yield done, commit, name, added
                added = []
            if line.startswith("\0commit "):
                commit, done = line.split()[1], done + 1
            elif line.startswith("+++ "):
                name = line[4:].strip().removeprefix("b/")
            elif line.startswith("+") and (key := (Path(name).suffix, line[1:].strip())) not in read:
                read.add(key)
                added.append(line[1:].rstrip("\n"))
        if added:
            yield done, commit, name, added


def _env_file(root: Path) -> Iterator[Check]:
    """Say whether ``.env``, where a variable's value may stand, is kept from git and from other users."""
    path, reason = root / ".env", "programs read the keys in .env; git and other users must not"
    if _git(root, "ls-files", "--", ".env").strip():
        yield judge(".env", "it is in git", reason, "git rm --cached .env, and revoke its keys", ".env", problem=True)
    elif path.exists() and not _git(root, "ls-files", "--others", "--ignored", "--exclude-standard", "--", ".env"):
        yield judge(".env", "git does not ignore it", reason, "echo .env >> .gitignore", ".gitignore", problem=True)
    if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        yield judge(".env", f"others may read it (mode {mode:o})", reason, "chmod 600 .env", ".env", warning=True)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout
