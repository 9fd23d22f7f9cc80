"""Guesses of the phase of a job that marks none."""

import pytest

from memfit.jobs._monitor import phase_of_log


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Loading checkpoint shards", "load"),
        ("Reading panel from disk", "load"),
        ("Building the vocabulary", "build"),
        ("Epoch 3/10", "train"),
        ("step: 400 loss 0.12", "train"),
        ("[train] iter 7", "train"),
        ("Validation loss 0.3", "validate"),
        ("evaluating on 300 samples", "validate"),
        ("epoch 4 val_loss=0.2", "validate"),
        ("Saved model to best.pt", "checkpoint"),
        ("writing checkpoint at step 300", "checkpoint"),
        ("stepping aside", None),
        ("downloaded", None),
        ("", None),
    ],
)
def test_a_line_of_a_log_tells_the_phase_or_nothing(line, phase):
    assert phase_of_log(line) == phase


def test_the_last_telling_line_counts():
    assert phase_of_log("Epoch 1\nvalidating\nsome other words\n") == "validate"


def test_a_progress_bar_is_read_as_lines():
    assert phase_of_log("Loading data\rEpoch 1: 10 %\rnothing") == "train"
