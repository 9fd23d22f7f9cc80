"""transformers' own Trainer on several ranks: a save counts if all of them made it. Their stops are test_conformance's."""

import os

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
transformers = pytest.importorskip("transformers")

from accelerate.state import AcceleratorState  # noqa: E402

import ranked  # noqa: E402
from integrations import bert  # noqa: E402
from memfit.errors import UsageError  # noqa: E402

#: 34 samples in batches of 2: 17 batches, so the last one of a rank is filled up from the first ones.
NUM_SAMPLES = 34


def train(rank, size, folder):
    AcceleratorState._reset_state(True)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return bert.train(folder, data=bert.Words(NUM_SAMPLES))


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield


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
    others = ranked.run(3, tmp_path, train, 3, tmp_path / "kept")
    assert all("world_size: 2 then, 3 now" in end.error for end in others)
    with pytest.raises(UsageError, match="world_size: 2 then, 1 now"):
        bert.train(tmp_path / "kept", data=bert.Words(NUM_SAMPLES))
    whole = ranked.values(ranked.run(2, tmp_path, train, 2, tmp_path / "whole"))
    assert ranked.values(ranked.run(2, tmp_path, train, 2, tmp_path / "kept")) == whole
