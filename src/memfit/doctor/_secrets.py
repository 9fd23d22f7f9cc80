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

_MOST_BYTES = 4 << 20  # a longer file is data, and is counted as not read
_COMMIT = "\0memfit-commit "
_REASON = "whoever reads the file, an image that holds it or the history has the key"


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
        return worst_first([*_Scan(root, progress or (lambda done, total: None)).checks(), *_env_file(root)])


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


class _Scan:
    """Reads the files, then each commit's new lines; a secret counts once, at the first place it is found."""

    def __init__(self, root: Path, progress: Callable[[int, int], None]) -> None:
        self.root, self.progress = root, progress
        self.known = set[tuple[str, str]]()
        self.num_unread = 0

    def checks(self) -> Iterator[Check]:
        names = [one for one in _git(self.root, "ls-files", "-z", "-co", "--exclude-standard").split("\0") if one]
        commits = _git(self.root, "rev-list", "--all").split()
        total, found = len(names) + len(commits), list[Check]()
        for done, name in enumerate(names):
            self.progress(done, total)
            path = self.root / name
            if not path.is_file() or path.is_symlink():
                continue
            if path.stat().st_size > _MOST_BYTES:
                self.num_unread += 1
                continue
            remedy = "revoke the key, and write the name of a variable there instead"
            found += [_problem(kind, f"{name}:{line}", remedy, "files") for kind, line in self.scan(path)]
        yield from found
        told = f"no secret in {len(names)} files" + (
            f"; {self.num_unread} too large to read" if self.num_unread else ""
        )
        yield from [] if found else [judge("secrets", told, _REASON, "", "files")]
        old = list(self.history(lambda done: self.progress(len(names) + done, total)))
        yield from old
        told = f"no {'other ' if found else ''}secret in {len(commits)} commits"
        yield from [] if old else [judge("secrets", told, _REASON, "", "git history")]

    def scan(self, path: Path) -> Iterator[tuple[str, int]]:
        """Yield type and line number of each secret that is new."""
        from detect_secrets.core.scan import scan_file, scan_for_allowlisted_secrets_in_file

        if b"allowlist secret" in path.read_bytes():
            allowed = scan_for_allowlisted_secrets_in_file(str(path))
            self.known.update((one.type, one.secret_hash) for one in allowed)  # the history's, too
        for one in list(scan_file(str(path))):
            if (key := (one.type, one.secret_hash)) not in self.known:
                self.known.add(key)
                yield one.type, one.line_number

    def history(self, progress: Callable[[int], None]) -> Iterator[Check]:
        """Yield the secrets of the lines that commits added. Each line of a kind of file is read once."""
        read, done = set[tuple[str, str]](), 0
        arguments = ("log", "--all", "-m", "-p", "-U0", "--no-color", "--no-renames", "--no-ext-diff", "--no-textconv")
        command = ["git", "-c", "core.quotepath=off", *arguments, f"--format=%x00{_COMMIT[1:]}%h"]
        with (
            tempfile.TemporaryDirectory() as scratch,
            subprocess.Popen(command, cwd=self.root, stdout=subprocess.PIPE, text=True, errors="replace") as git,
        ):
            assert git.stdout is not None
            commit, name, added = "", "", list[str]()

            def secrets() -> Iterator[Check]:
                if not added:
                    return
                path = Path(scratch) / Path(name).name  # the kind of file decides how a line is read
                path.write_text("\n".join(added) + "\n")
                remedy = "revoke the key: who has a clone has it, even if git filter-repo takes it out of the history"
                for kind, _ in self.scan(path):
                    yield _problem(kind, f"{name} in commit {commit}", remedy, "git history")
                path.unlink()
                added.clear()

            for line in git.stdout:
                if line.startswith((_COMMIT, "+++ ")):
                    yield from secrets()
                if line.startswith(_COMMIT):
                    commit, done = line[len(_COMMIT) :].strip(), done + 1
                    progress(done)
                elif line.startswith("+++ "):
                    name = line[4:].strip().removeprefix("b/")
                elif line.startswith("+") and (key := (Path(name).suffix, line[1:].strip())) not in read:
                    read.add(key)
                    added.append(line[1:].rstrip("\n"))
            yield from secrets()


def _problem(kind: str, where: str, remedy: str, source: str) -> Check:
    return judge("secrets", f"{kind} in {where}", _REASON, remedy, source, problem=True)


def _env_file(root: Path) -> Iterator[Check]:
    """Say whether ``.env``, where a variable's value may stand, is kept from git and from other users."""
    path, reason = root / ".env", "programs read the keys in .env; git and other users must not"
    in_git = bool(_git(root, "ls-files", "--", ".env").strip())
    command = ["git", "check-ignore", "-q", ".env"]
    is_ignored = subprocess.run(command, cwd=root, check=False, stdout=subprocess.DEVNULL).returncode == 0
    if in_git:
        yield judge(".env", "it is in git", reason, "git rm --cached .env, and revoke its keys", ".env", problem=True)
    elif path.exists() and not is_ignored:
        yield judge(".env", "git does not ignore it", reason, "echo .env >> .gitignore", ".gitignore", problem=True)
    if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        yield judge(".env", f"others may read it (mode {mode:o})", reason, "chmod 600 .env", ".env", warning=True)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout
