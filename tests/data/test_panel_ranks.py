"""One mapped panel for all ranks of a node: the ranks of a real process group hold one copy of it between them."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from memfit.data import Panel

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
]

NUM_RANKS = 2
RANK = """
import json, re, sys
from pathlib import Path
import torch, torch.distributed as dist
from memfit.data import Panel
dist.init_process_group("gloo")
panel = Panel.open(Path(sys.argv[1]))
total = torch.tensor(float(panel.values.sum(dtype="float64")))
dist.all_reduce(total)
dist.barrier()  # all have read all of it, and none has gone
pss = 0
for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
    if str(panel.path) in part.partition("\\n")[0]:
        pss += 1024 * int(re.search(r"Pss: +(\\d+)", part).group(1))
Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps({"pss": pss, "total": total.item()}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.proves("S3-35", "C-16")
def test_the_ranks_of_a_process_group_hold_one_copy_of_the_panel(tmp_path):
    num_dates, num_assets = 400, 1000
    values = np.random.default_rng(0).random(num_dates * num_assets).astype(np.float32)
    table = pa.table(
        {
            "date": np.repeat(np.datetime64("2020-01-01") + np.arange(num_dates), num_assets),
            "code": [f"A{i:04d}" for i in range(num_assets)] * num_dates,
            **{f"f{i}": values for i in range(10)},
            "y": values,
        }
    )
    panel = Panel.build(table, tmp_path / "panels", features=[f"f{i}" for i in range(10)], targets=["y"])
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    done = subprocess.run(
        [*command, "rank.py", str(panel.path), str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    assert [one["total"] for one in found] == pytest.approx(
        [NUM_RANKS * float(values.sum(dtype="float64")) * 10] * NUM_RANKS
    )
    held = sum(one["pss"] for one in found)
    assert 0.95 * panel.values.nbytes <= held <= 1.1 * panel.nbytes
