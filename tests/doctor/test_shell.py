"""The Python scripts that a shell script starts."""

import os
import sys

import pytest

from memfit.doctor._shell import commands_of


@pytest.fixture
def follow(tmp_path):
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b.py", "c.py", "d.py", "src/e.py"):
        (tmp_path / name).write_text("")

    def run(text, words=("bash", "run.sh"), mode=0o644):
        (tmp_path / "run.sh").write_text(text)
        (tmp_path / "run.sh").chmod(mode)
        return commands_of(words, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})

    return run


@pytest.mark.parametrize(
    ("line", "script", "arguments"),
    [
        ("python a.py --x 1", "a.py", ("--x", "1")),
        ("A=1 exec python3 -u a.py 'two words'  # why", "a.py", ("two words",)),
        ("torchrun --nproc-per-node 2 a.py --x", "a.py", ("--x",)),
        ("if true; then python a.py > log; fi", "a.py", ()),
        ("cd src && python e.py", "src/e.py", ()),
        ("python a.py \\\n  --x $X", "a.py", ("--x", "$X")),
        ('python a.py "$@"', "a.py", ("p", "q")),
        ("nohup python a.py &", "a.py", ()),
    ],
)
def test_a_line_that_plainly_starts_a_script_is_followed(follow, tmp_path, line, script, arguments):
    [command] = follow(f"#!/bin/bash\nset -e\n{line}\n", ["bash", "-e", "run.sh", "p", "q"])
    assert (command.script, command.arguments, command.site) == (tmp_path / script, arguments, "run.sh line 3")


@pytest.mark.parametrize(
    "line",
    ["python $SCRIPT", 'python "$DIR/a.py"', "python `ls`", "$PYTHON a.py", "# python a.py", "echo python a.py",
     "cat a.py", "cat <<EOF\npython a.py\nEOF", "cd $DIR\npython a.py", "echo 'open\npython a.py",
     "echo 'a\npython a.py\n'", "python a.py 'one\npython b.py'", "python ~/a.py", "python ?.py"],
)  # fmt: skip
def test_what_is_not_plain_is_left_out_and_what_was_looked_at_is_named(follow, line):
    [command] = follow(f"{line}\n")
    assert (command.script, command.site, command.looked_at) == (None, "", "run.sh")


def test_of_several_the_first_three_are_given_each_with_its_line_and_environment(follow):
    found = follow("export A=1\npython a.py\nB=2 python b.py\npython c.py; python d.py\n")
    assert [one.script.name for one in found] == ["a.py", "b.py", "c.py"]
    assert [one.site for one in found] == ["run.sh line 2", "run.sh line 3", "run.sh line 4"]
    assert [one.env for one in found] == [{"A": "1"}, {"A": "1", "B": "2"}, {"A": "1"}]


def test_a_file_with_a_shell_in_its_first_line_and_the_text_of_c_are_followed_too(follow):
    [command] = follow("#!/usr/bin/env bash\npython a.py\n", ["./run.sh"], 0o755)
    assert (command.script.name, command.site) == ("a.py", "run.sh line 2")
    [command] = follow("", ["env", "A=1", "bash", "-lc", "python a.py"])
    assert (command.script.name, command.site, command.env) == ("a.py", "bash -c line 1", {"A": "1"})


def test_a_shell_script_that_is_not_there_is_missing_and_a_pipe_is_not_opened(follow, tmp_path):
    assert "no file 'nowhere.sh'" in follow("", ["bash", "nowhere.sh"])[0].missing
    os.mkfifo(tmp_path / "pipe")
    for words in (["bash", "pipe"], ["bash"], ["bash", "-e"], ["bash", "x" * 9000]):
        [command] = follow("", words)
        assert (command.script, command.site) == (None, "")


def test_a_python_that_is_itself_a_shell_script_is_no_script_to_follow(follow, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexec /usr/bin/python3 b.py\n")
    (tmp_path / "python").chmod(0o755)
    [command] = follow("", ["./python", "a.py"])
    assert (command.script.name, command.site) == ("a.py", "")


def test_the_interpreter_is_that_of_an_activated_environment_and_else_not_guessed(follow, tmp_path):
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    [command] = follow("source env/bin/activate\npython a.py\n")
    assert command.interpreter == str(tmp_path / "env/bin/python")
    [command] = follow("conda activate train\npython a.py\n")
    assert command.interpreter is None


def test_each_script_is_examined_and_the_place_is_told_once(diagnose):
    script = "import polars, os\nos.fork()\n"
    files = {"run.sh": "python train.py\npython other.py\npython nothere.py\n", "other.py": script}
    found = diagnose(script, words=["bash", "run.sh"], files=files)
    assert [one.finding.split()[2] for one in found["fork"][:2]] == ["train.py:2", "other.py:2"]
    told = " ".join(one.finding for one in found["script"])
    assert all(f"run.sh line {line}" in told for line in (1, 2, 3))
    assert [one.verdict for one in found["script"]] == ["warning", "ok", "ok"]
    assert len(found["budget"]) == 1
    [none] = diagnose(words=["bash", "run.sh"], files={"run.sh": "ls\n"})["script"]
    assert (none.verdict, "run.sh was looked at" in none.finding) == ("warning", True)
