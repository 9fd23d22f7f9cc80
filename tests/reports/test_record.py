"""What can be said of the next run from the runs so far."""

import json
import re
from pathlib import Path

from memfit.jobs import JobStatus
from memfit.reports._record import Kills, count_kills, forecast_error
from memfit.reports._run_view import JobRow
from memfit.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]


def row(peak, reserved, state="completed"):
    status = JobStatus("fold_1", state, peak_bytes=peak)
    return JobRow("fold", "", status, 1.0, reserved, 0, 0, None, result={}, params={}, phase_source="")


def test_kills_are_counted_over_the_experiments_runs_that_ended(tmp_path):
    runs = [RunDir.create(tmp_path, "demo", f"{number}" * 64) for number in range(4)]
    for run, states in zip(runs[:2], (["completed"] * 3, ["completed", "out_of_memory"]), strict=True):
        jobs = {f"fold_{i}": {"state": state, "cause": ""} for i, state in enumerate(states)}
        (run.path / "outcome.json").write_text(json.dumps({"state": "failed", "jobs": jobs}))
    (runs[2].path / "outcome.json").write_text("torn")
    found = count_kills(runs[3])
    assert (found.num_killed, found.num_jobs, found.num_runs) == (1, 5, 2)
    assert found.low < 0.2 < found.high


def test_the_interval_of_no_kill_in_many_jobs_is_narrow_and_of_few_wide():
    assert Kills.count(0, 1000, 9).high < 0.005
    assert Kills.count(0, 3, 1).high > 0.5
    assert Kills.count(3, 3, 1).high == 1.0


def test_no_share_is_told_without_its_sample():
    assert re.fullmatch(r"0 of 7 jobs in 1 run .*95 % interval 0\.0 to 35\.4 %\)", Kills.count(0, 7, 1).explain())


def test_the_forecasts_error_is_told_over_jobs_that_had_a_reservation_and_completed():
    found = forecast_error([row(100, 110), row(100, 90), row(100, 130), row(100, None), row(100, 500, "failed")])
    assert found is not None
    assert (found.num, found.num_under) == (3, 1)
    assert round(found.median, 6) == 0.1
    assert forecast_error([row(100, None)]) is None


def test_no_text_of_memfits_speaks_of_a_risk_in_percent():
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert not [text for text in texts if re.search(r"\d\s?%\s*(OOM )?(risk|chance|probab)", text)]
