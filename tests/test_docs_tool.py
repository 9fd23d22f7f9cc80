"""The documents' commands are run, and a document that shows something else than what happens is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "run_docs.py"


def check(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = folder / "page.md"
    path.write_text(text)
    return subprocess.run([sys.executable, str(TOOL), str(path)], capture_output=True, text=True, timeout=60)


def console(*lines: str, before: str = "") -> str:
    return "\n".join(("# Title", before, "```console", *lines, "```", ""))


@pytest.mark.parametrize(
    "lines",
    [
        ["$ echo one; echo two", "one", "two"],
        ["$ echo one  two three", "one ... three"],
        ["$ seq 5", "1", "...", "5"],
        ["$ seq 5", "...", "3", "...", "5", "..."],
        ["$ seq 3", "..."],
        ["$ echo unseen"],
        ["$ echo out; echo err >&2", "out", "err"],
        ["$ echo a \\", "> b", "a b"],
        ["$ echo x > kept", "$ cat kept", "x"],
        ["$ echo $COLUMNS $NO_COLOR", "120 1"],
        ["$ ls pyproject.toml", "pyproject.toml"],
        ['$ test "$XDG_STATE_HOME" = "$PWD/.state"'],
        ["$ test ! -e runs && test ! -e .git"],
        ["$ command -v python | xargs dirname | xargs basename", "bin"],
        ["$ echo 'a (b) [c]*'", "a (b) [c]*"],
    ],
)
def test_a_document_that_shows_what_happens_passes(tmp_path: Path, lines: list[str]) -> None:
    done = check(tmp_path, console(*lines))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "1 blocks run, 0 skipped, 0 places differ" in done.stdout


def test_a_block_that_is_a_file_is_written_and_not_run(tmp_path: Path) -> None:
    file = "<!-- file: half.py -->\n```python\nprint(1 /\n```\n"
    done = check(tmp_path, file + console("$ cat half.py", "print(1 /"))
    assert done.returncode == 0 and "1 blocks run, 0 skipped, 0 places differ" in done.stdout, done.stdout
    assert "'../a.py' is no name of a file" in check(tmp_path, file.replace("half.py", "../a.py")).stdout


@pytest.mark.proves("S0-47", "C-34")
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["$ echo one", "two"], ["page.md:4: $ echo one", "-two", "+one"]),
        (["$ echo one", "one", "two"], ["page.md:4:", "-two"]),
        (["$ seq 5", "1", "...", "4"], ["page.md:4:"]),
        (["$ echo abc", "a...d"], ["-a...d", "+abc"]),
        (["$ true", "$ echo broken; false"], ["page.md:5:", "exit status 1, not 0", "broken"]),
        (["$ false", "$ true"], ["page.md:4:", "exit status 1"]),
        (["$ no-such-program"], ["exit status 127"]),
        (["$ memfit-is-not-this --flag", "ok"], ["page.md:4:"]),
    ],
)
def test_a_document_that_shows_something_else_fails(tmp_path: Path, lines: list[str], told: list[str]) -> None:
    done = check(tmp_path, console(*lines))
    assert done.returncode == 1
    for text in told:
        assert text in done.stdout


@pytest.mark.slow
def test_a_command_that_is_said_to_fail_must_fail_that_way(tmp_path: Path) -> None:
    assert check(tmp_path, console("$ true", "$ exit 2", before="<!-- exit: 2 -->")).returncode == 0
    assert check(tmp_path, console("$ exit 3", before="<!-- exit: 2 -->")).returncode == 1
    assert check(tmp_path, console("$ true", before="<!-- exit: 2 -->")).returncode == 1
    assert check(tmp_path, console("$ exit 2", "$ exit 2", before="<!-- exit: 2 -->")).returncode == 1


def test_a_skipped_block_is_named_with_its_reason_and_not_run(tmp_path: Path) -> None:
    done = check(tmp_path, console(f"$ touch {tmp_path}/ran; false", before="<!-- skip: needs a cluster -->"))
    assert done.returncode == 0
    assert "page.md:4: skipped: needs a cluster" in done.stdout
    assert not (tmp_path / "ran").exists()
    assert check(tmp_path, console("$ true", before="<!-- skip: -->")).returncode == 2


def test_numbers_vary_where_a_block_says_so(tmp_path: Path) -> None:
    lines = [
        "$ echo 'epoch 1/3 took 2.5s in run_20260101_120000_aa00'",
        "epoch 3/3 took 10s in run_20260102_130000_b1f2",
    ]
    assert check(tmp_path, console(*lines)).returncode == 1
    assert check(tmp_path, console(*lines, before="<!-- numbers: vary -->")).returncode == 0
    other = [lines[0], "epoch 3/3 lasted 10s in run_20260102_130000_b1f2"]
    assert check(tmp_path, console(*other, before="<!-- numbers: vary -->")).returncode == 1


def test_that_a_busy_machine_takes_longer_than_ten_seconds_is_no_difference(tmp_path: Path) -> None:
    beats = "$ printf '%s\\n' 'reading the logs (10.0s)' 'reading the logs (1m 00s)' 'cmd_1 ended (0.1s)'"
    assert check(tmp_path, console(beats, "cmd_1 ended (0.1s)")).returncode == 0
    assert check(tmp_path, console(beats, "cmd_1 ended (0.2s)")).returncode == 1


def test_python_blocks_of_a_file_share_one_namespace(tmp_path: Path) -> None:
    text = "```python\nx = 20 + 1\n```\n```console\n$ echo hi > file\n```\n```python\nassert x == 21\n{}\n```\n"
    assert check(tmp_path, text.format("assert open('file').read() == 'hi\\n'")).returncode == 0
    done = check(tmp_path, text.format("assert x == 22"))
    assert done.returncode == 1
    assert "page.md:9: AssertionError" in done.stdout
    assert "page.md:2: SyntaxError" in check(tmp_path, "```python\nx = = 1\n```\n").stdout


def test_prompts_in_python_blocks_are_compared(tmp_path: Path) -> None:
    assert check(tmp_path, "```python\n>>> 1 + 1\n2\n>>> x = 3\n```\n```python\nassert x == 3\n```\n").returncode == 0
    done = check(tmp_path, "```python\n>>> 1 + 1\n3\n```\n")
    assert done.returncode == 1
    assert "Expected" in done.stdout


def test_a_shell_block_that_nobody_runs_is_refused(tmp_path: Path) -> None:
    assert check(tmp_path, "```bash\ntrue\n```\n").returncode == 1
    assert check(tmp_path, "<!-- skip: for another machine -->\n```bash\ntrue\n```\n").returncode == 0


def test_blocks_in_lists_and_of_other_languages_are_told_apart(tmp_path: Path) -> None:
    listed = "1. Do\n\n   ```console\n   $ echo a; echo '  b'\n   a\n     b\n   ```\n\n"
    quoted = "````text\n```console\n$ false\n```\n````\n"
    done = check(tmp_path, listed + quoted)
    assert done.returncode == 0, done.stdout
    assert "1 blocks run" in done.stdout


@pytest.mark.parametrize("text", ["```console\n$ true\n", "```console\nfirst\n$ true\n```\n"])
def test_a_document_that_cannot_be_read_is_bad_usage(tmp_path: Path, text: str) -> None:
    assert check(tmp_path, text).returncode == 2


@pytest.mark.slow
def test_bad_usage_is_told_from_a_difference(tmp_path: Path) -> None:
    for arguments, status in (([], 2), (["--help"], 0), (["--unknown"], 2), ([str(tmp_path / "none.md")], 2)):
        done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == status
        assert done.stdout


def test_memfit_variables_of_the_caller_do_not_reach_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_SEED", "3")
    assert check(tmp_path, console('$ echo "[$MEMFIT_SEED]"', "[]")).returncode == 0
