"""What a job's watcher says of the device memory that the job takes."""

import os

from memfit.jobs import JobStatus
from memfit.jobs._monitor import Monitor
from memfit.rundir import EventWriter, RunDir


def test_where_the_driver_shows_no_processes_a_job_counts_with_what_its_torch_holds(tmp_path):
    job = {"phases": [], "num_devices": 2, "env": {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}}
    watch = Monitor(RunDir(tmp_path), job, JobStatus("fold_1", "running", pid=os.getpid()))
    watch.observe()
    writer = EventWriter(tmp_path / "events", "fold_1")
    for held in (50, 30):
        devices = [{"bytes": held, "peak_bytes": 90}, {"bytes": 0, "peak_bytes": 7}]
        writer.write("phase", phase="train", devices=devices)
    writer.write("phase", phase="train", devices="what else a job may write")
    writer.close()
    watch._looked = 0.0
    watch.observe()
    assert watch.status().device_used_bytes == {"GPU-a": 30, "GPU-b": 0}
    assert watch.footprint().device_bytes == {"GPU-a": 90, "GPU-b": 7}
