"""``make lines``: what each room weighs, and the numbers that only fall."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "rooms.py"
NUMBERS = (
    "moved = []\n\n[rooms.jobs]\nwanted = 1\n\n[rooms.data]\n\n[others.tools]\n\n[words.user_pages]\npages = ['*']\n"
)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("rooms_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rooms(tool, tmp_path, monkeypatch, capsys):
    """A repository whose first commit has numbers: 100 lines of jobs, 100 of data and 10 of tests, and two words."""

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a", *arguments], check=True)

    class Rooms:
        def lines(self, path, n, line="a b"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{line}\n" * n)

        def edit(self, *pairs):
            for old, new in pairs:
                text = (tmp_path / tool.FILE).read_text()
                assert old in text
                (tmp_path / tool.FILE).write_text(text.replace(old, new, 1))

        def commit(self):
            git("add", ".")
            git("commit", "--quiet", "-m", "numbers")

        def __call__(self, *flags, code=None, at=tmp_path):
            monkeypatch.setattr(tool, "ROOT", at)
            monkeypatch.setattr(sys, "argv", ["rooms.py", *flags])
            if code is None:
                tool.main()
            else:
                with pytest.raises(SystemExit) as caught:
                    tool.main()
                assert caught.value.code == code
            return capsys.readouterr().out.splitlines()

    it = Rooms()
    it.lines("src/memfit/jobs/_job.py", 100)
    it.lines("src/memfit/data/_build.py", 100)
    it.lines("tests/jobs/test_job.py", 10)
    it.lines("README.md", 1)
    it.lines("tools/rooms.toml", 1, NUMBERS)
    git("init", "--quiet")
    assert "data lines: 100, without a number in tools/rooms.toml: run make lines ARGS=--write" in it("--check", code=1)
    it("--write")
    it.commit()
    assert it("--check", code=0) == ["6 numbers hold, compared with 1 versions in git"]
    return it


def test_what_is_above_its_number_is_named_with_its_excess(rooms):
    rooms.lines("src/memfit/jobs/_more.py", 2)
    rooms.lines("README.md", 2)
    rooms.lines("tests/test_words.py", 1)
    assert rooms("--check", code=1) == [
        "jobs lines: 102, 2 above their number 100",
        "jobs tokens: 204, 4 above their number 200",
        "repository tests: 1, without a number in tools/rooms.toml: run make lines ARGS=--write",
        "user_pages words: 4, 2 above their number 2",
    ]


def test_what_is_far_below_its_number_is_refused_until_the_number_is_lowered(rooms):
    rooms.lines("src/memfit/jobs/_job.py", 97)
    assert rooms("--check", code=0)
    rooms.lines("src/memfit/jobs/_job.py", 96)
    wrong = "more than 3 % below their number"
    assert [line for line in rooms("--check", code=1) if wrong not in line] == []
    rooms("--write")
    assert rooms("--check", code=0) == ["6 numbers hold, compared with 1 versions in git"]
    rooms.lines("src/memfit/jobs/_job.py", 97)
    rooms("--write")
    assert rooms("--check", code=1)[0] == "jobs lines: 97, 1 above their number 96"
    assert ["jobs", "97", "96", "1", "10", "194"] in [line.split() for line in rooms()]


def test_longer_lines_are_no_way_to_have_fewer(rooms):
    rooms.lines("src/memfit/jobs/_job.py", 98, "a b c")
    assert rooms("--check", code=1)[-1] == (
        "the library: 2.49 tokens a line, at most 2.06 are allowed: write shorter lines"
    )


def test_a_number_that_rose_is_refused_unless_as_much_moved_there(rooms):
    rooms.lines("src/memfit/jobs/_job.py", 110)
    rooms.lines("src/memfit/data/_build.py", 90)
    rooms.edit(("lines = 100", "lines = 110"), ("tokens = 200", "tokens = 220"))
    assert rooms("--check", code=1)[2:] == [
        "jobs lines: their number is 110, an earlier one allows 100",
        "the library: the sum of its lines rose by 10",
        "the library: the sum of its tokens rose by 20",
    ]
    rooms.edit(("moved = []", 'moved = ["data -> jobs 10"]'), ("lines = 100", "lines = 92"))
    assert "data lines: their number is 92, an earlier one allows 90" in rooms("--check", code=1)
    rooms("--write")
    assert rooms("--check", code=0)
    rooms.commit()
    rooms.edit(('"data -> jobs 10"', ""))
    assert rooms("--check", code=1) == ["jobs lines: their number is 110, an earlier one allows 100"]
    rooms.edit(("[]", '["ten lines of data"]'))
    assert "is not of the form 'pipeline -> reports 40'" in rooms("--check", code=1)[0]


def test_a_shallow_clone_and_a_copy_without_git_say_what_was_compared(rooms, tmp_path, tmp_path_factory):
    rooms.lines("README.md", 0)
    rooms("--write")
    rooms.commit()
    clone, copy = tmp_path_factory.mktemp("clone") / "a", tmp_path_factory.mktemp("copy")
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", tmp_path.as_uri(), clone], check=True)
    assert rooms("--check", code=0, at=clone)[-1].endswith("with 1 versions in git, all of this shallow clone")
    for name in ("src", "tools", "tests"):
        (clone / name).rename(copy / name)
    assert "no git repository here" in rooms("--check", code=0, at=copy)[-1]


@pytest.mark.slow
@pytest.mark.skipif(not (TOOL.parents[1] / ".git").exists(), reason="not in a git checkout")
def test_an_earlier_commit_is_shown_beside_today(rooms):
    lines = [line.split() for line in rooms("--since", "HEAD", at=TOOL.parents[1])]
    assert lines[0] == ["HEAD", "now", "number", "wanted", "tests", "tokens"]
    assert {"jobs", "memory", "systems", "user_pages"} <= {line[0] for line in lines if line}
