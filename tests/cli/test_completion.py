"""The shell completes verbs and flags, and falls back to files behind the --."""

import subprocess
import sys
from pathlib import Path

import pytest

MEMFIT = Path(sys.executable).with_name("memfit")


@pytest.mark.slow
def test_bash_completes_verbs_and_flags_after_one_install(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    subprocess.run(["bash", "-c", f"{MEMFIT} --install-completion; exit $?"], check=True, capture_output=True)
    program = tmp_path.joinpath(".bashrc").read_text()
    for words, wanted in (
        ("memfit re", "resume report"),
        ("memfit panel b", "build"),
        ("memfit estimate --gradient-c", "--gradient-checkpointing"),
        ("memfit nosuch x", ""),
        ("memfit run -- python t", ""),
    ):
        ask = (
            f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; _memfit_completion {MEMFIT}; echo ${{COMPREPLY[*]}}"
        )
        done = subprocess.run(["bash", "-c", program + ask], capture_output=True, text=True, check=True)
        assert (done.stdout.strip(), done.stderr) == (wanted, ""), words
