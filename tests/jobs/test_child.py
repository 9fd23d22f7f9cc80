"""Functions in interpreters of their own."""

import pytest

from memfit.errors import ConfigError, JobFailedError, MemfitError, UsageError
from memfit.jobs import Job, call_in_child, load_target


def test_a_result_comes_back():
    assert call_in_child("memfit.units:format_bytes", {"count": 1 << 30}) == "1.00 GiB"


def test_memfits_own_error_comes_back_whole():
    with pytest.raises(ConfigError) as caught:
        call_in_child("memfit.units:parse_bytes", {"text": "much"})
    assert "'much' is not a size" in caught.value.what
    assert caught.value.remedy


def test_another_error_is_quoted():
    with pytest.raises(MemfitError, match=r"\.py:\d+ failed: json.decoder.JSONDecodeError: Expecting"):
        call_in_child("json:loads", {"s": "no"})


def test_a_child_that_a_signal_ended_is_no_fault_of_the_code(tmp_path, monkeypatch):
    (tmp_path / "dies.py").write_text("import os, signal\ndef now(): os.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JobFailedError, match="ended by signal 9") as caught:
        call_in_child("dies:now", {})
    assert "give the same command again" in caught.value.remedy and "code" not in caught.value.remedy


def test_a_child_that_was_killed_once_is_tried_again(tmp_path, monkeypatch):
    text = "import os, pathlib, signal\ndef now(mark):\n    if not pathlib.Path(mark).exists():\n"
    text += "        pathlib.Path(mark).touch(); os.kill(os.getpid(), signal.SIGKILL)\n    return 'done'\n"
    (tmp_path / "dies.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert call_in_child("dies:now", {"mark": str(tmp_path / "mark")}) == "done"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("math", "names no code"),
        ("no_such_module:x", "no module 'no_such_module'"),
        ("math:sqroot", "did you mean 'sqrt'"),
    ],
)
def test_a_target_that_names_nothing_is_refused_with_a_hint(target, words):
    with pytest.raises(UsageError, match=words):
        load_target(target)


def test_a_module_that_misses_another_module_is_not_called_absent(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        load_target("needy:x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": ()}, "neither a function nor a command"),
        ({"target": "b:c"}, "both"),
        ({"ranks": 4, "num_devices": 2}, "4 ranks and asks for 2 GPUs"),
        ({"num_devices": -1}, "asks for -1 devices"),
        ({"device_bytes": 1}, "asks for 0 devices"),
        *(({"id": name}, "cannot name a job") for name in ("", "../up", "a/b", ".hidden")),
    ],
)
def test_what_no_job_can_be_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        Job(**{"id": "x", "command": ("a",)} | options)
