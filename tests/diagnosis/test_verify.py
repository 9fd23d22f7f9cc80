"""Whether a fixed script was really in force, by what the run left."""

import zipfile

import pytest

from memfit.diagnosis import read_ran, verify_fix

OLD = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --mem=256G
#SBATCH --time=24:00:00
srun python train.py dataloader.params.batch_size=22 dataloader.params.num_workers=2
"""
SACCT = (
    "JobID|State|ReqMem|NTasks|NNodes|Timelimit\n"
    "273300|COMPLETED|{mem}||4|{limit}\n273300.0|COMPLETED||16|4|\n"
)  # fmt: skip
BAR = "Epoch 0: 100%|##########| {steps}/{steps} [22:54<00:00,  0.21it/s, loss=5.19]\n"


@pytest.fixture
def against(tmp_path):
    """Writes the old script, and the fixed one with other values; gives the fixed one's path."""

    def write(mem="400G", batch=20, workers=1, more=""):
        (tmp_path / "train.slurm").write_text(OLD)
        text = OLD.replace("256G", mem).replace("=22", f"={batch}").replace("num_workers=2", f"num_workers={workers}")
        path = tmp_path / "train.fixed.slurm"
        path.write_text(text.replace("\nsrun", f"\n{more}srun").rstrip("\n") + "\n")
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Writes a run's folder and reads it."""

    def write(text="", accounting="", name="run", **files):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.log").write_text(text)
        for file, content in files.items():
            (folder / file).write_text(content)
        return read_ran([folder], accounting)

    return write


def of(checks, name):
    return next(check for check in checks if check.check == name)


@pytest.mark.proves("S3-05")
@pytest.mark.parametrize(("batch", "verdict"), [(22, "ok"), (20, "problem"), (18, "problem")])
def test_9680_steps_in_40_epochs_mean_that_22_ran(run, against, tmp_path, batch, verdict):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/epoch=39-step=9680.ckpt").write_bytes(b"x" * 100)
    (tmp_path / "run/train.log").write_text("Number of training samples: 85,109\n")
    ran = read_ran([tmp_path / "run"])
    assert (ran.steps_per_epoch, ran.job.samples) == (242, 85109)
    assert [(one.name, one.bytes) for one in ran.checkpoints] == [("epoch=39-step=9680.ckpt", 100)]
    check = of(verify_fix(ran, against(batch=batch)), "batch")
    assert check.verdict == verdict
    assert "a batch of 22" in check.finding


@pytest.mark.proves("S3-17")
def test_the_bars_of_an_epoch_tell_the_batch_as_well(run, against):
    text = "Number of training samples: 85109\n" + BAR.format(steps=266)
    assert of(verify_fix(run(text), against(batch=20)), "batch").verdict == "ok"


def test_the_run_before_stands_in_for_the_number_of_samples(run, against):
    before, ran = run(BAR.format(steps=242), name="before"), run(BAR.format(steps=242))
    check = of(verify_fix(ran, against(batch=20), before=before), "batch")
    assert check.verdict == "problem" and "a batch of 22" in check.finding
    changed = run(BAR.format(steps=266), name="changed")
    assert of(verify_fix(changed, against(batch=20), before=before), "batch").verdict == "ok"


@pytest.mark.proves("C-14")
def test_steps_win_over_what_was_printed(run, against):
    text = "batch_size: 20\nNumber of training samples: 85109\n" + BAR.format(steps=242)
    assert of(verify_fix(run(text), against(batch=20)), "batch").verdict == "problem"


def test_a_batch_that_nothing_shows_is_said_to_be_not_shown(run, against):
    check = of(verify_fix(run("hello\n"), against()), "batch")
    assert check.verdict == "warning" and "not shown" in check.finding


@pytest.mark.proves("S3-23")
def test_memory_tasks_and_time_come_from_the_accounting(run, against):
    checks = verify_fix(run(accounting=SACCT.format(mem="1600G", limit="1-00:00:00")), against(mem="400G"))
    assert [of(checks, name).verdict for name in ("memory", "nodes", "tasks", "time")] == ["ok"] * 4
    old = verify_fix(run(accounting=SACCT.format(mem="1T", limit="1-00:00:00"), name="old"), against(mem="400G"))
    assert of(old, "memory").verdict == "problem"
    assert "256.00 GiB of each node in force, 400.00 GiB" in of(old, "memory").finding


@pytest.mark.parametrize(("cpus", "verdict"), [(16, "ok"), (32, "ok"), (8, "problem")])
def test_cpus_of_a_task_come_from_the_accounting(run, against, cpus, verdict):
    path = against(more="")
    path.write_text(path.read_text().replace("#SBATCH --mem", "#SBATCH --cpus-per-task=4\n#SBATCH --mem"))
    rows = f"JobID|State|NTasks|NNodes|NCPUS\n7|COMPLETED||1|{cpus}\n7.0|COMPLETED|4|1|{cpus}\n"
    assert of(verify_fix(run(accounting=rows), path), "cpus").verdict == verdict


def test_without_accounting_memory_is_not_shown_and_the_command_that_shows_it_is_given(run, against):
    check = of(verify_fix(run("x\n"), against()), "memory")
    assert check.verdict == "warning" and "sacct -j" in check.remedy


def test_workers_come_from_what_the_program_printed(run, against):
    same = verify_fix(run("num_workers: 1\n"), against(workers=1))
    assert of(same, "workers").verdict == "ok"
    other = of(verify_fix(run("{'num_workers': 2}\n", name="other"), against(workers=1)), "workers")
    assert other.verdict == "problem" and "the override's key must exist" in other.remedy


def test_of_a_very_long_log_the_settings_at_its_beginning_and_the_steps_at_its_end_are_read(tmp_path):
    path = tmp_path / "long.log"
    with open(path, "w") as file:
        file.write("num_workers: 3\n")
        file.writelines(f"{'x' * 990}\n" for _ in range(40_000))
        file.write(BAR.format(steps=242))
    ran = read_ran([path])
    assert ran.job.workers == 3 and ran.printed["workers"]["3"].endswith(":1")
    assert ran.steps_per_epoch == 242


@pytest.mark.proves("S3-29")
def test_checkpoints_are_counted_and_an_empty_one_is_a_problem(against, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (242, 2420):
        (folder / f"epoch=1-step={step}.ckpt").write_bytes(b"x" * 1024)
    unproved = of(verify_fix(read_ran([folder]), against()), "checkpoints")
    assert unproved.verdict == "warning" and "2 files, 2.0 KiB; not proved: epoch=1-step=242.ckpt, " in unproved.finding
    for step in (242, 2420):
        with zipfile.ZipFile(folder / f"epoch=1-step={step}.ckpt", "w") as archive:
            archive.writestr("data.pkl", "x" * 500)
    good = of(verify_fix(read_ran([folder]), against()), "checkpoints")
    assert good.verdict == "ok" and "the newest epoch=1-step=2420.ckpt" in good.finding
    assert good.finding.endswith("s old")
    with zipfile.ZipFile(folder / "last.ckpt", "w") as archive:
        archive.writestr("data.pkl", "x" * 500)
    assert of(verify_fix(read_ran([folder]), against()), "checkpoints").verdict == "ok"
    whole = (folder / "last.ckpt").read_bytes()
    for content in (b"", whole[:-40]):
        (folder / "last.ckpt").write_bytes(content)
        bad = of(verify_fix(read_ran([folder]), against()), "checkpoints")
        assert bad.verdict == "problem" and "cannot be loaded: last.ckpt" in bad.finding


def test_memory_of_each_cpu_is_held_against_what_the_granted_cpus_have_of_it(run, tmp_path):
    path = tmp_path / "a.fixed.slurm"
    path.write_text("#!/bin/bash\n#SBATCH --ntasks=8 --mem-per-cpu=6G\nsrun python a.py\n")
    rows = "JobID|State|ReqMem|NTasks|NNodes|NCPUS\n7|COMPLETED|{}||2|16\n7.0|COMPLETED||8|2|16\n"
    granted, other = run(accounting=rows.format("96G")), run(accounting=rows.format("64G"), name="other")
    assert of(verify_fix(granted, path), "memory").verdict == "ok"
    assert of(verify_fix(other, path), "memory").finding == (
        "32.00 GiB of each node in force, 48.00 GiB of each node in the fixed script"
    )
