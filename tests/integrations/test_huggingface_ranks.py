"""transformers' own Trainer on several ranks: one seal, one step of a stop, and each rank's bytes as without a stop."""

import functools
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
transformers = pytest.importorskip("transformers")

from accelerate.state import AcceleratorState  # noqa: E402

import ranked  # noqa: E402
from integrations import bert  # noqa: E402
from jobs.contract import submit, wait_for_end  # noqa: E402
from memfit.errors import UsageError  # noqa: E402
from memfit.files import read_json  # noqa: E402
from memfit.jobs import Job, LocalBackend, Parent, start_env  # noqa: E402
from memfit.rundir import RunDir, read_events  # noqa: E402

#: 34 samples in batches of 2: 17 batches, so the last one of a rank is filled up from the first ones.
NUM_SAMPLES = 34


class Draws(transformers.TrainerCallback):
    """Notes what a rank would draw in each step, and the samples of which its batches are."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append((state.global_step, torch.get_rng_state().sum().item()))


def train(rank, size, folder, victim=None, settings=()):
    """Train on one rank; ``victim``: (rank, step, signal)."""
    AcceleratorState._reset_state(True)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    draws, options = Draws(), {"data": bert.Words(NUM_SAMPLES), **dict(settings)}
    moment = {}
    if victim is not None and rank == victim[0]:
        moment = {"at": victim[1], "send": victim[2], "where": options.pop("where", "on_step_begin")}
    options.pop("where", None)
    return bert.train(folder, callbacks=[draws], **moment, **options), draws.seen


def run(size, folder, victim=None, **settings):
    folder.mkdir(exist_ok=True)
    return ranked.run(size, folder, train, size, folder / "kept", victim, tuple(settings.items()))


@functools.cache
def whole(size, **settings):
    """What each rank ends with if nothing stops it."""
    return ranked.values(run(size, Path(tempfile.mkdtemp()), **settings))


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield


def test_a_signal_to_one_rank_stops_all_at_one_step_and_each_goes_on_to_its_bytes(tmp_path):
    ends = run(2, tmp_path, (1, 6, "TERM"))  # in the second epoch
    assert all("StoppedError: Stopped by SIGTERM after step 7 of 10" in end.error for end in ends)
    facts = json.loads((tmp_path / "kept" / "checkpoint-7" / "SEAL.json").read_text())
    assert facts["facts"]["identity"]["world_size"] == 2
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(facts["files"])
    found = ranked.values(run(2, tmp_path))
    assert [end for end, _ in found] == [end for end, _ in whole(2)]
    for (_, seen), (_, undisturbed) in zip(found, whole(2), strict=True):
        assert seen == undisturbed[7:]
    assert whole(2)[0][0] == whole(2)[1][0] and whole(2)[0][1] != whole(2)[1][1], "each rank draws its own numbers"


def die_in_save(rank, size, folder):
    if rank == 1:
        own = transformers.Trainer._save_rng_state

        def dies(trainer, path):
            own(trainer, path)
            if trainer.state.global_step == 6:
                os.kill(os.getpid(), 9)

        transformers.Trainer._save_rng_state = dies
    return train(rank, size, folder)


def test_a_save_in_which_a_rank_died_is_not_taken_and_another_number_of_ranks_is_refused(tmp_path):
    ends = ranked.run(2, tmp_path, die_in_save, 2, tmp_path / "kept")
    assert [end.code for end in ends] == [79, -9]
    assert not (tmp_path / "kept" / "checkpoint-6" / "SEAL.json").exists()
    others = run(3, tmp_path)
    assert all("world_size: 2 then, 3 now" in end.error for end in others)
    with pytest.raises(UsageError, match="world_size: 2 then, 1 now"):
        bert.train(tmp_path / "kept", data=bert.Words(NUM_SAMPLES))
    found = ranked.values(run(2, tmp_path))
    assert [end for end, _ in found] == [end for end, _ in whole(2)]


def test_in_a_run_a_lost_rank_costs_a_generation_and_no_byte(tmp_path):
    run_dir = RunDir.create(tmp_path, "ranks", "0" * 64)
    env = {**os.environ, **start_env(tight_malloc=True, cuda_allocator=None)}
    parent = Parent.start("integrations.bert:train_as_rank", env | {"PYTHONPATH": str(Path(__file__).parents[1])})
    try:
        backend = LocalBackend(run_dir, grace_seconds=20, parent=parent)
        arguments = {"folder": str(tmp_path / "kept"), "loses": True}
        paths = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        submit(backend, Job("j", target="integrations.bert:train_as_rank", arguments=arguments, ranks=2, env=paths))
        assert wait_for_end(backend, "j").state == "completed"
    finally:
        parent.close()
    digest, losses = whole(2)[0][0]
    assert read_json(run_dir.job_dir("j") / "result.json")["result"] == [digest, [list(one) for one in losses]]
    lost = [one for one in read_events(run_dir.events_dir) if one["kind"] == "rank_lost"]
    assert [(one["rank"], one["code"], one["step"]) for one in lost] == [(1, -9, 4)]
