"""Bars and lines of progress in the forms that programs print."""

import random
import time

import pytest

from memfit.diagnosis._log_progress import read_progress, read_saved
from memfit.diagnosis._progress_bars import read_bar
from memfit.diagnosis._text import Line
from memfit.diagnosis._training_account import check_rate


def lines(text):
    return [Line("train.out", number, line) for number, line in enumerate(text.split("\n"), 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Epoch 0: 100%|██████████| 242/242 [22:54<00:00,  0.21it/s, v_num=0, loss=5.190]",
            ("tqdm", "train", 0, 242, 242, 0.21, 5.19),
        ),
        (
            "Validation DataLoader 0:   0%|          | 0/57 [00:00<?, ?it/s]",
            ("tqdm", "validate", None, 0, 57, None, None),
        ),
        (
            "Sanity Checking DataLoader 0:  50%|█████     | 1/2 [00:01<00:01,  1.00it/s]",
            ("tqdm", "validate", None, 1, 2, 1.0, None),
        ),
        ("  1%|▏         | 120/9680 [09:31<12:38:00,  5.00s/it]", ("tqdm", "", None, 120, 9680, 0.2, None)),
        (
            "Loading checkpoint shards:  57% 4/7 [00:37<00:28, 10.00s/it]ERROR: glued",
            ("tqdm", "build", None, 4, 7, 0.1, None),
        ),
        (
            "Map (num_proc=4):  10%|█ | 1.2k/12k [00:01<00:09, 1000.00 examples/s]",
            ("tqdm", "load", None, 1200, 12000, 1000.0, None),
        ),
        (
            "Epoch 0/39 ━━━━━━━━━━━━╸━━ 121/242 0:11:27 • 0:11:27 0.21it/s v_num: 0 train/loss: 5.190",
            ("tqdm", "train", 0, 121, 242, 0.21, 5.19),
        ),
        (
            "| epoch 001:    450 / 1891 loss=11.521, nll_loss=10.881, wps=52922, ups=0.5, oom=0",
            ("fairseq", "train", 1, 450, 1891, 0.5, 11.521),
        ),
        (
            "| epoch 010 | valid on 'valid' subset  1000 / 1311 loss=1.60",
            ("fairseq", "validate", 10, 1000, 1311, None, 1.6),
        ),
        (
            " iteration      182/  250000 | consumed samples: 186368 | elapsed time per iteration (ms): 2000.0 | lm loss: 2.382640E+00 |",
            ("Megatron", "train", None, 182, 250000, 0.5, 2.38264),
        ),
        (
            "steps: 120 loss: 5.19 iter time (s): 4.000 samples/sec: 73.9",
            ("DeepSpeed", "train", None, 120, None, 0.25, 5.19),
        ),
        ("Epoch: [3][415/1736]\t Loss 0.5844 MAE 0.6568", ("brackets", "train", 3, 415, 1736, None, 0.5844)),
        ("Train: 3 [  50/1251 (  4%)]  Loss: 6.9 (6.9)", ("brackets", "train", 3, 50, 1251, None, 6.9)),
        ("Test: [ 10/100]  Loss 0.5", ("brackets", "validate", None, 10, 100, None, 0.5)),
        (
            "Epoch: [0]  [ 120/242]  eta: 0:10:00  loss: 5.1000 (6.2000)  time: 4.0000  max mem: 12345",
            ("brackets", "train", 0, 120, 242, 0.25, 5.1),
        ),
        ("120/242 [=====>.....] - ETA: 5s - loss: 5.19", ("Keras", "train", None, 120, 242, None, 5.19)),
        (
            "{'loss': 1.5, 'grad_norm': 0.1, 'learning_rate': 5e-05, 'epoch': 0.5}",
            ("Transformers", "train", 0, None, None, None, 1.5),
        ),
        (
            "{'eval_loss': 1.2, 'eval_runtime': 3.0, 'epoch': 1.0}",
            ("Transformers", "validate", 1, None, None, None, None),
        ),
        ("INFO epoch 3/40, step 12/242, loss 5.19", ("line", "train", 3, 12, 242, None, 5.19)),
        ("Step 120/9680 | loss=5.1", ("line", "train", None, 120, 9680, None, 5.1)),
    ],
)
def test_each_form_of_progress_is_read(text, expected):
    bar = read_bar(Line("-", 1, text))
    found = (bar.form, bar.phase, bar.epoch, bar.step, bar.total, bar.rate, bar.loss)
    assert found[:5] == expected[:5]
    assert found[5:] == tuple(None if value is None else pytest.approx(value) for value in expected[5:])


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.75 GiB total)",
        "/home/user/a/b.py:12",
        "2024/05/01 loss of signal",
        "50% of 3/4",
        "Downloading 3 files",
    ],
)
def test_other_lines_are_no_progress(text):
    assert read_bar(Line("-", 1, text)) is None


def run(*, epochs=1, claim=True):
    text = ["num_epochs: 40", "2025-10-16 14:11:10 start"]
    for epoch in range(epochs):
        for step, loss in ((0, 21.3), (121, 9.0), (242, 5.19)):
            clock = f"{step * 1374 // 242 // 60:02d}:{step * 1374 // 242 % 60:02d}"
            text.append(
                f"Epoch {epoch}: {step * 100 // 242:3d}%|####| {step}/242 [{clock}<00:00,  0.21it/s, loss={loss}]"
            )
    text += ["2025-10-16 14:34:04 Training completed"] if claim else []
    return [
        Line(line.file, line.number, line.text, None, line.text[:19] if line.text.startswith("2025") else "")
        for line in lines("\n".join(text))
    ]


def test_an_epoch_is_counted_and_its_loss_and_rate_are_kept():
    progress = read_progress(run())
    assert (progress.steps_per_epoch, progress.epochs_done, progress.num_epochs) == (242, 1, 40)
    assert (progress.first_loss, progress.last_loss) == (21.3, 5.19)
    check = check_rate(progress.train.total, progress.train.rate, progress.train.seconds)
    assert round(check.bar_seconds / 60), round(check.wall_seconds / 60) == (19, 23)


def test_a_timeline_tells_what_began_and_what_was_reached():
    found = [(moment.time[11:], moment.what) for moment in read_progress(run()).timeline]
    assert found == [
        ("14:11:10", "train epoch 0 begins"),
        ("14:11:10", "train epoch 0 reached 242/242"),
        ("14:34:04", "says that it is done"),
    ]


def test_steps_over_all_epochs_are_not_taken_for_those_of_one():
    progress = read_progress(lines("  1%|▏| 120/9680 [09:31<12:38:00,  4.76s/it]\nStep 130/9680 | loss=5.1"))
    assert progress.steps_per_epoch is None
    assert progress.global_step == 130


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Epoch 39, global step 9680: saving model to 'out/epoch=39-step=9680.ckpt' as top 1",
            ("out/epoch=39-step=9680.ckpt", 39, 9680, True),
        ),
        ("Saving model checkpoint to ./results/checkpoint-500", ("./results/checkpoint-500", None, 500, True)),
        ("Resuming from ./results/checkpoint-500", ("./results/checkpoint-500", None, 500, False)),
        ("[Torch] Saved out/global_step1000/mp_rank_00_model_states.pt.", None),
        ("Saved checkpoint to out/checkpoint_12.pt", ("out/checkpoint_12.pt", 12, None, True)),
        ("Saving checkpoint to out/last", ("out/last", None, None, True)),
    ],
)
def test_checkpoints_are_read_from_their_names(text, expected):
    saved = read_saved(Line("-", 1, text))
    if expected is None:
        assert (saved.step, saved.written) == (1000, True)
    else:
        assert (saved.name, saved.epoch, saved.step, saved.written) == expected


def test_gradient_checkpointing_is_no_checkpoint():
    assert read_saved(Line("-", 1, "use_cache=True is incompatible with gradient checkpointing")) is None
    assert read_saved(Line("-", 1, 'File "torch/utils/checkpoint.py", line 1, in checkpoint')) is None


def test_long_and_many_lines_are_read_in_little_time():
    noise = [f"2025-01-01 INFO some / text 3/4 iteration at {number} loss unknown" for number in range(3000)]
    noise += ["x" * 3900 + "%|1/2 epoch ", "epoch [1/2 step ━━• 50%| " * 150, "checkpoint " + "a_b-c/." * 500] * 50
    start = time.process_time()
    read_progress(lines("\n".join(noise)))
    assert time.process_time() - start < 3


def test_torn_lines_are_never_a_fault():
    chance = random.Random(1)
    text = (
        "\n".join(line.text for line in run(epochs=2))
        + "\nepoch 001:  450 / 1891 loss=11.5, ups=0.5\nsteps: 1 loss: 5.1 iter time (s): 4.0"
    )
    for _ in range(150):
        torn = list(text)
        for _ in range(40):
            torn[chance.randrange(len(torn))] = chance.choice("0123456789|:,.+-[]<=%/\n ")
        read_progress(lines("".join(torn)))
