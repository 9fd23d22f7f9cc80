"""The program's entry: what a Ctrl-C does while it loads, and what jobs see of its environment."""

import os
import signal
import subprocess
import sys

SLOW = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "memfit.cli":
            print("loading", flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
from memfit.__main__ import main
main()
"""


def test_a_ctrl_c_while_it_loads_ends_it_without_a_traceback():
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == ""


def test_a_job_finds_the_variables_that_the_user_gave(tmp_path):
    show = "import os; print(os.environ.get('PYDANTIC_DISABLE_PLUGINS'))"
    for given in (None, "logfire-plugin"):
        env = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
        env |= {} if given is None else {"PYDANTIC_DISABLE_PLUGINS": given}
        command = [sys.executable, "-m", "memfit", "run", "--quiet", "--new", "--", sys.executable, "-c", show]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert str(given) in done.stdout.splitlines(), done.stdout + done.stderr
