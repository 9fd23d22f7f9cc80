"""What a command is, from its words."""

import sys
import zipfile

import pytest

from memfit.doctor import parse_command


@pytest.fixture
def look(diagnose, tmp_path):
    """The finding on the script of a command in a folder with a few files, and all checks."""
    for name in ("train.py", "pkg/__main__.py", "pkg/job.py"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def words(text):
        found = diagnose(words=text.split())
        return found["script"][0], found

    return words


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("python train.py --lr 1", "train.py"),
        ("python3.11 -u -W error -X dev train.py x", "train.py"),
        ("python -uW error train.py", "train.py"),
        ("python -m pkg a", "pkg/__main__.py"),
        ("python -mpkg", "pkg/__main__.py"),
        ("python -um pkg.job", "pkg/job.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py a", "train.py"),
        ("accelerate launch --num_processes=3 train.py --x", "train.py"),
        ("env A=1 python train.py", "train.py"),
        ("env A=1 nice -n 5 python -u train.py x", "train.py"),
        ("env -u A -i B=1 python train.py", "train.py"),
        ("python -I -c pass 1 2", "-c"),
    ],
)
def test_the_script_is_found_behind_the_options_of_what_runs_it(look, text, script):
    check, _ = look(text)
    assert (check.verdict, check.finding.partition(" read: ")[0]) == ("ok", script)


@pytest.mark.parametrize(
    "text",
    ["python - other.py", "python /dev/null x", "python app.pyz", "python pkg", "python -m elsewhere", "python missing.py", "python " + "x" * 9000, "python -m pkg.nothing",
     "python", "python -c", "bash run.sh", "bash -c true", "sh -c " + "x" * 9000 + ".py"],
)  # fmt: skip
def test_where_no_script_is_seen_a_warning_says_so(look, tmp_path, text):
    (tmp_path / "project/run.sh").write_text("python train.py\n")
    with zipfile.ZipFile(tmp_path / "project/app.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    check, _ = look(text)
    assert (check.verdict, "no Python script is seen" in check.finding) == ("warning", True)
    assert "memfit doctor -- python train.py" in check.remedy


@pytest.mark.parametrize(
    ("text", "told"),
    [("torchrun --nproc_per_node=4 train.py", "4 processes x (1 thread) = 4 threads"),
     ("torchrun --nproc-per-node 2 train.py", "2 processes x"),
     ("torchrun --nproc-per-node=gpu train.py", "1 thread on"), ("python train.py", "1 thread on")],
)  # fmt: skip
def test_a_launcher_says_how_many_processes_there_are(look, text, told):
    assert look(text)[1]["threads"][0].finding.startswith(told)


def asked_program(folder, *words, path="/nowhere"):
    return parse_command(words, cwd=folder, env={"PATH": path}).interpreter


def test_the_interpreter_is_the_program_itself_or_the_one_of_its_first_line(tmp_path):
    for name, first in (("tool", sys.executable), ("shell", "/bin/sh")):
        (tmp_path / name).write_text(f"#!{first}\n")
        (tmp_path / name).chmod(0o755)
    assert asked_program(tmp_path, "tool", path=str(tmp_path)) == sys.executable
    assert asked_program(tmp_path, sys.executable, "train.py") == sys.executable
    assert asked_program(tmp_path, "env", f"PATH={tmp_path}", "tool") == sys.executable
    assert asked_program(tmp_path, "env", "-u", "A", sys.executable, "train.py") == sys.executable
    for words in (("shell",), ("python", "train.py")):
        assert asked_program(tmp_path, *words, path=str(tmp_path)) is None
