"""Files are read through one opener, and what is no text is told to be none."""

import ast
import os
import random
from pathlib import Path

import pytest

import memfit
from memfit.diagnosis import diagnose
from memfit.errors import UsageError
from memfit.rundir import RunDir

SOURCE = Path(memfit.__file__).parent
MESSAGE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
#: Readers of the kernel's files, of what a user names as a script, and of an own folder that is only written to.
OTHERS = {
    ("diagnosis/_fix.py", "open"),
    ("diagnosis/_fix.py", "read_text"),
    ("diagnosis/_runs.py", "open"),
    ("jobs/_death.py", "read_text"),
    ("jobs/_fork.py", "read_text"),
    ("jobs/_fork.py", "open"),
    ("jobs/_warm.py", "read_bytes"),
    ("jobs/_warm.py", "read_text"),
    ("jobs/_shim.py", "open"),
}


@pytest.mark.parametrize("package", ["diagnosis", "jobs", "reports"])
def test_no_reader_of_a_run_directory_opens_its_files_by_itself(package):
    found = set()
    for path in (SOURCE / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                name = called if called == "open" else called.rpartition(".")[2]
                if called == "open" or (name in ("read_text", "read_bytes") and "." in called):
                    found.add((f"{package}/{path.name}", name))
    assert found == {one for one in OTHERS if one[0].startswith(f"{package}/")}


def test_noise_is_told_to_be_no_text_and_beside_a_log_it_is_passed_over_with_a_word(tmp_path, capsys):
    noise = tmp_path / "noise.log"
    noise.write_bytes(random.Random(0).randbytes(1 << 16) * 48)
    with pytest.raises(UsageError, match=r"(?s)noise\.log.* no text"):
        diagnose(noise)
    (tmp_path / "train.log").write_text(MESSAGE)
    assert diagnose(tmp_path).kind == "gpu"
    assert f"passed over: {noise}: it is no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "before",
    [bytes(1 << 16), "显存不足 训练 ".encode("gbk") * 2000, b"\x1b[31mred\x1b[0m\r" * 5000, "größe ".encode("latin-1") * 5000],
    ids=["zeros of a log that was cut", "GBK", "colours", "Latin-1"],
)  # fmt: skip
def test_text_in_other_encodings_is_read(tmp_path, before):
    (tmp_path / "train.log").write_bytes(before + b"\n" + MESSAGE.encode())
    assert diagnose(tmp_path / "train.log").kind == "gpu"


def test_a_log_that_is_named_may_be_a_link_outside_of_a_run_and_a_pipe_of_the_shell_and_no_fifo(tmp_path, monkeypatch):
    (tmp_path / "train.log").write_text(MESSAGE)
    (tmp_path / "link.log").symlink_to("train.log")
    assert diagnose(tmp_path / "link.log").kind == "gpu"
    of_node = RunDir.create(tmp_path, "group", "0" * 64).job_dir("train") / "nodes_1/jobs/node_0"
    of_node.mkdir(parents=True)
    (of_node / "err.log").symlink_to(tmp_path / "train.log")
    with pytest.raises(UsageError):
        diagnose(of_node / "err.log")
    monkeypatch.chdir(of_node.parents[4])  # the run directory, which the path of this log leads out of
    assert diagnose("../../train.log").kind == "gpu"
    out, into = os.pipe()
    os.write(into, MESSAGE.encode())
    os.close(into)
    assert diagnose(f"/dev/fd/{out}").kind == "gpu"
    os.close(out)
    os.mkfifo(tmp_path / "fifo.log")
    with pytest.raises(UsageError) as caught:
        diagnose(tmp_path / "fifo.log")
    assert "not a regular file" in caught.value.rule
