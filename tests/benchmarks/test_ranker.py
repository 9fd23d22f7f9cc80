"""What the benchmark of the ranker compares by, without a run."""

import pytest
import torch

from memfit.files import write_json
from memfit.memory import Sample, SeriesWriter
from memfit.training import save_checkpoint
from stages_here import digest_of


@pytest.fixture
def ranker(benchmark):
    return benchmark("ranker")


def write_series(run, job, rows):
    folder = run / "jobs" / job
    folder.mkdir(parents=True)
    series = SeriesWriter(folder / "memory.jsonl")
    for second, private in rows:
        series.append(Sample(second, 1, private, 0, private, private, "train"))
    series.close()


def test_the_peak_of_all_jobs_counts_those_that_ran_at_the_same_time(ranker, tmp_path):
    write_series(tmp_path, "a", [(1.0, 100), (2.0, 300), (3.0, 50)])
    write_series(tmp_path, "b", [(2.5, 40), (4.0, 320)])  # beside the 300 of a, then alone
    assert ranker.peak_of_all(tmp_path) == 340


def test_tensors_are_compared_by_their_bytes_and_a_missing_file_is_told(ranker, tmp_path):
    assert ranker.same_bits(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not ranker.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not ranker.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert ranker.same_bits(torch.tensor(1.5), torch.tensor(1.5))
    for run, value in (("first", 1.0), ("second", 1.0 + 1e-7)):
        folder = tmp_path / run / "checkpoints" / "fold_1"
        folder.mkdir(parents=True)
        state = {"memfit_checkpoint": 1, "epoch": 1, "fit": "x", "identity": {}, "model": {"w": torch.tensor([value])}}
        save_checkpoint(folder / "latest_checkpoint.pt", state)
    save_checkpoint(tmp_path / "first/checkpoints/fold_1/ema_epoch_1.pt", state)
    num, found = ranker.differing_checkpoints(tmp_path / "first", tmp_path / "second")
    assert (num, found) == (1, ["fold_1/ema_epoch_1.pt is in one run only", "fold_1/latest_checkpoint.pt: .model.w"])


def test_a_decision_is_compared_without_the_run_s_name_and_the_comparisons_on_record(ranker, tmp_path):
    told = {"schema_version": 1, "stage": "decision", "job": "decision", "status": "completed", "why": "", "key": ""}
    told |= {"exit_code": 0, "parts": {}, "settings": {}, "code": {}, "outputs": [], "seconds": 1.0}
    told |= {"unforeseen": {}, "reused_from": None}
    first = {"a": "x/run_1", "b": "random", "effect": 0.1, "num_comparisons": 1, "adjusted_p_value": 0.02}
    others = {"second": {"a": "x/run_2", "num_comparisons": 3, "adjusted_p_value": 0.06}, "third": {"effect": 0.2}}
    for run, changed in {"first": {}, **others}.items():
        (tmp_path / run / "checkpoints").mkdir(parents=True)
        made = {"result": first | changed, "digest": digest_of(first | changed, [])}
        write_json(tmp_path / run / "checkpoints" / "stage_decision.json", told | made)
    runs = [tmp_path / run for run in ("first", "second", "third")]
    assert ranker.differing_results(runs[0], runs[1], ["stage_decision"]) == []
    assert ranker.differing_results(runs[0], runs[2], ["stage_decision"]) == ["stage_decision: effect"]
