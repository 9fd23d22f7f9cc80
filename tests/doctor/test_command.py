"""What a command is, from its words."""

import sys
import zipfile

import pytest

from memfit.doctor._command import parse_command


@pytest.fixture
def parse(tmp_path):
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/__main__.py", "pkg/job.py"):
        (tmp_path / name).write_text("")

    def words(text, path="/nowhere"):
        return parse_command(text.split(), cwd=tmp_path, env={"PATH": path})

    return words


@pytest.mark.parametrize(
    ("text", "script", "arguments"),
    [
        ("python train.py --lr 1", "train.py", ("--lr", "1")),
        ("python3.11 -u -W error -X dev train.py x", "train.py", ("x",)),
        ("python -m pkg a", "pkg/__main__.py", ("a",)),
        ("python -m pkg.job", "pkg/job.py", ()),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py a", "train.py", ("a",)),
        ("accelerate launch --num_processes=3 train.py --x", "train.py", ("--x",)),
        ("env A=1 python train.py", "train.py", ()),
        ("env A=1 nice -n 5 python -u train.py x", "train.py", ("x",)),
    ],
)
def test_the_script_and_its_arguments_are_found_behind_the_options_of_what_runs_it(
    parse, tmp_path, text, script, arguments
):
    command = parse(text)
    assert (command.script, command.arguments) == (tmp_path / script, arguments)


@pytest.mark.parametrize(
    ("text", "script"),
    [("python -um pkg.job", "pkg/job.py"), ("python -uW error train.py", "train.py"), ("python pkg", "pkg/__main__.py"),
     ("python -mpkg", "pkg/__main__.py"), ("python - other.py", None), ("python /dev/null x", None),
     ("python app.pyz", None), ("python -m elsewhere", None)],
)  # fmt: skip
def test_what_python_can_run_is_not_missing(parse, tmp_path, text, script):
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    command = parse(text)
    assert (command.script, command.missing) == (tmp_path / script if script else None, "")


def test_a_module_that_a_package_of_the_folder_lacks_is_missing(parse, tmp_path):
    (tmp_path / "pkg/__init__.py").write_text("")
    assert "no module 'pkg.nothing'" in parse("python -m pkg.nothing").missing
    (tmp_path / "pkg/nothing.cpython-311-x86_64-linux-gnu.so").write_text("")
    assert parse("python -m pkg.nothing").missing == ""


@pytest.mark.parametrize("text", ["python " + "x" * 9000, "sh -c " + "x" * 9000 + ".py"])
def test_a_word_too_long_for_a_name_is_no_script(parse, text):
    assert parse(text).script is None


@pytest.mark.parametrize("text", ["python", "python -c", "python missing.py", "bash -c true", "python -m nothing.here"])
def test_where_the_words_name_no_script_there_is_none(parse, text):
    assert parse(text).script is None


def test_the_text_of_c_is_kept_and_its_arguments_too(parse):
    command = parse("python -I -c pass 1 2")
    assert (command.code, command.arguments, command.script) == ("pass", ("1", "2"), None)


@pytest.mark.parametrize(
    ("text", "count"),
    [("torchrun --nproc_per_node=4 train.py", 4), ("torchrun --nproc-per-node 2 train.py", 2),
     ("torchrun --nproc-per-node=gpu train.py", 1), ("python train.py", 1)],
)  # fmt: skip
def test_a_launcher_says_how_many_processes_there_are(parse, text, count):
    assert parse(text).num_processes == count


def test_the_interpreter_is_the_program_itself_or_the_one_of_its_first_line(parse, tmp_path):
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n")
    tool.chmod(0o755)
    (tmp_path / "shell").write_text("#!/bin/sh\n")
    (tmp_path / "shell").chmod(0o755)
    assert parse("tool", str(tmp_path)).interpreter == sys.executable
    assert parse(f"{sys.executable} train.py").interpreter == sys.executable
    assert parse("shell", str(tmp_path)).interpreter is None
    assert parse("python train.py").interpreter is None


def test_the_path_that_env_gives_is_the_one_that_counts(parse, tmp_path):
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n")
    tool.chmod(0o755)
    command = parse(f"env PATH={tmp_path} tool")
    assert (command.interpreter, command.env, command.words) == (sys.executable, {"PATH": str(tmp_path)}, ("tool",))
