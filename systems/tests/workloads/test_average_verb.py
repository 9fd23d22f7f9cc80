"""``memfit average``: snapshots of one training, for one fold or for all of them."""

import pytest

torch = pytest.importorskip("torch")

from memfit.training import load_checkpoint, save_checkpoint  # noqa: E402


@pytest.fixture
def snapshots(tmp_path):
    """Of two folds, each with snapshots at epochs 3, 6 and 10; the second one stopped after epoch 6."""
    for fold, epochs in {1: (3, 6, 10), 2: (3, 6)}.items():
        for epoch in epochs:
            state = {"model": {"weight": torch.full((2,), float(10 * fold + epoch))}}
            state |= {"memfit_checkpoint": 1, "fit": f"fit {fold}", "epoch": epoch, "identity": {"seed": fold}}
            save_checkpoint(tmp_path / f"ranker_fold{fold}_ema_epoch{epoch}.pt", state, prove=False)
    return tmp_path


def value(path):
    return load_checkpoint(path)["model"]["weight"][0].item()


def test_named_snapshots_are_averaged(memfit, snapshots):
    names = [f"ranker_fold1_ema_epoch{epoch}.pt" for epoch in (3, 6, 10)]
    done = memfit("average", *names, "--output", "models/blended.pt")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.startswith("models/blended.pt: the mean of 3 files\n  ranker_fold1_ema_epoch3.pt  after epoch 3  ")
    assert value(snapshots / "models/blended.pt") == pytest.approx(10 + 19 / 3)


@pytest.mark.proves("S0-27")
def test_all_folds_are_averaged_by_one_command(memfit, snapshots):
    done = memfit(
        "average", "--param", "fold=1..2", "ranker_fold{fold}_ema_epoch*.pt", "--output", "ranker_fold{fold}_blended.pt"
    )
    assert done.exit_code == 0
    assert value(snapshots / "ranker_fold1_blended.pt") == pytest.approx(10 + 19 / 3)
    assert value(snapshots / "ranker_fold2_blended.pt") == 24.5
    lines = done.out.splitlines()
    assert "ranker_fold2_blended.pt: the mean of 2 files" in lines
    epochs = [line.split("after epoch ")[1].split()[0] for line in lines if "after" in line]
    assert epochs == ["3", "6", "10", "3", "6"]


def test_a_snapshot_that_a_stop_left_out_is_named(memfit, snapshots):
    names = [f"ranker_fold{{fold}}_ema_epoch{epoch}.pt" for epoch in (3, 6, 10)]
    done = memfit("average", "--param", "fold=1..2", *names, "--output", "blended_{fold}.pt")
    assert done.exit_code == 2
    assert "ranker_fold2_ema_epoch10.pt is not there; . has ranker_fold1_ema_epoch3.pt, " in done.err
    assert not (snapshots / "blended_1.pt").exists()


def test_averages_with_one_name_and_patterns_without_a_file_are_refused(memfit, snapshots):
    done = memfit("average", "--param", "fold=1..2", "ranker_fold{fold}_ema_epoch3.pt", "--output", "blended.pt")
    assert done.exit_code == 2
    assert "2 averages would be written to blended.pt" in done.err
    done = memfit("average", "absent_*.pt", "--output", "blended.pt")
    assert done.exit_code == 2
    assert "absent_*.pt is not there" in done.err
