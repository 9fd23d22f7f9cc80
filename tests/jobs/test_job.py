"""A job's status in words."""

from memfit.jobs import JobStatus

MIB = 1 << 20


def test_an_end_is_told_with_its_time_and_its_peak_of_what_was_reserved_if_a_sample_met_it():
    status = JobStatus("fold_1", "completed", started=10.0, ended=15.2, peak_bytes=228 * MIB)
    assert status.describe_end(251 * MIB) == "completed (5.2s), peak 228.0 MiB of 251.0 MiB reserved"
    assert status.describe_end(None) == "completed (5.2s), peak 228.0 MiB"
    assert JobStatus("cmd_0001", "failed").describe_end(251 * MIB) == "failed, peak not measured"
