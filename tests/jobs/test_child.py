"""Functions in interpreters of their own."""

from types import SimpleNamespace

import pytest

from memfit.errors import ConfigError, MemfitError, UsageError
from memfit.jobs import Job, call_in_child, load_target
from memfit.jobs._child import cap_device


def test_a_result_comes_back():
    assert call_in_child("memfit.units:format_bytes", {"count": 1 << 30}) == "1.00 GiB"


def test_memfits_own_error_comes_back_whole():
    with pytest.raises(ConfigError) as caught:
        call_in_child("memfit.units:parse_bytes", {"text": "much"})
    assert "'much' is not a size" in caught.value.what
    assert caught.value.remedy


def test_another_error_is_quoted():
    with pytest.raises(MemfitError, match="JSONDecodeError: Expecting"):
        call_in_child("json:loads", {"s": "no"})


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


@pytest.mark.parametrize("options", [{"command": ()}, {"command": ("a",), "target": "b:c"}])
def test_a_job_is_either_a_function_or_a_command(options):
    with pytest.raises(UsageError, match="function"):
        Job("x", **options)


def test_a_local_function_cannot_be_a_job():
    with pytest.raises(UsageError, match="cannot be imported"):
        Job.of("x", lambda: None)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden"])
def test_a_job_id_that_cannot_be_a_folder_is_refused(name):
    with pytest.raises(UsageError, match="cannot name a job"):
        Job(name, command=("true",))


class TorchOfOneDevice:
    """Stands in for torch: a device of so many bytes, and what was set on it."""

    def __init__(self, total_bytes, *, available=True):
        self.set = []
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            get_device_properties=lambda index: SimpleNamespace(total_memory=total_bytes),
            set_per_process_memory_fraction=lambda fraction, index: self.set.append((fraction, index)),
        )


def test_a_job_gets_its_part_of_the_device():
    torch = TorchOfOneDevice(8 << 30)
    assert cap_device({"MEMFIT_DEVICE_BYTES": str(2 << 30)}, {"torch": torch}) == 0.25
    assert torch.set == [(0.25, 0)]


def test_a_part_larger_than_the_device_is_all_of_it():
    torch = TorchOfOneDevice(1 << 30)
    cap_device({"MEMFIT_DEVICE_BYTES": str(2 << 30)}, {"torch": torch})
    assert torch.set == [(1.0, 0)]


@pytest.mark.parametrize("env", [{}, {"MEMFIT_DEVICE_BYTES": "100"}])
def test_no_device_is_capped_without_a_cap_or_a_device(env):
    torch = TorchOfOneDevice(1 << 30, available=not env)
    assert cap_device(env, {"torch": torch}) is None
    assert cap_device(env, {}) is None
    assert torch.set == []
