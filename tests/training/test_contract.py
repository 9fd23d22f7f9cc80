"""What every loop promises, whoever owns it: a row for each promise, a column for each loop."""

import re
import signal

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from training import loops
from training.contract import COLUMNS

TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL


#: `make test` has memfit's own loops in all rows, of those of frameworks one where a row has no other.
MARKS = {name: pytest.mark.core if name in ("Trainer", "Loop") else pytest.mark.slow for name in COLUMNS}


def those_with(name, names=COLUMNS):
    """Let a row have only the columns of which this is true."""
    columns = [one for one in names if getattr(COLUMNS[one], name)]
    columns = [pytest.param(one, marks=MARKS[one] if at else pytest.mark.core) for at, one in enumerate(columns)]
    return pytest.mark.parametrize("loop", columns, indirect=True)


@pytest.fixture(params=[pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def loop(request):
    return COLUMNS[request.param]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


MOMENTS = [
    (("batch", 1, 4), USR1, 2),
    (("save", 6), TERM, 0),
    (("batch", 0, 5), INT, 0),
    (("batch", 1, 3), KILL, 2),
]
#: Of the loops of frameworks, test_conformance has the others.
AT = [(name, *row) for name in COLUMNS for row in (MOMENTS if name in ("Trainer", "Loop") else MOMENTS[:2])]


@pytest.mark.core
@pytest.mark.proves("S1-34")
@pytest.mark.parametrize(("loop", "moment", "number", "workers"), AT, indirect=["loop"], ids=str)
def test_a_stop_or_a_kill_at_any_moment_ends_in_the_same_bytes(loop, folder, moment, number, workers):
    first = loop.run(folder, moment, number, workers=workers)
    assert first.code == (-9 if number == KILL else 75), first.said
    if number != KILL:
        assert f"Stopped by {number.name}" in first.said and "Traceback" not in first.said
    second = loop.run(folder)
    assert (second.code, second.digest) == (0, loop.whole().digest), second.said
    is_proved = re.search("came out as before|not proved", second.said)
    assert is_proved or "goes on" not in second.said, second.said
    assert "came out as before" in second.said or moment != MOMENTS[0][0], second.said
    assert second.seen == loop.whole().seen[-len(second.seen) :]


def test_several_stops_in_one_training_change_nothing_and_then_nothing_is_left(loop, folder):
    for moment in [("batch", 0, 1), ("evaluation", 0), ("batch", 2, 1)]:
        found = loop.run(folder, moment)
        assert found.code == 75, found.said
    last, over = loop.run(folder), loop.run(folder, num_times=2)
    assert (last.code, last.digest) == (0, loop.whole().digest), last.said
    assert (over.code, over.digest, over.seen) == (0, last.digest, []), over.said
    assert over.said.count("nothing is left to train") == 2 and "the largest" not in over.said


@those_with("run", ["Loop", "Lightning", "Accelerate"])
@pytest.mark.parametrize(
    ("times", "steps"), [({}, {4}), ({"every": 5}, {4, 5}), ({"every": 5, "every_seconds": None}, {5})]
)
def test_a_checkpoint_comes_after_steps_or_seconds_whichever_are_over_first(loop, folder, events, times, steps):
    found = loop.run(folder, late=("batch", 1, 1), times=times)
    assert {event["step"] for event in events("checkpoint")} - {3, 6, 9} == steps, found.said
    assert (found.code, found.digest) == (0, loop.whole().digest), found.said


@pytest.mark.proves("S1-36")
def test_a_torn_checkpoint_is_passed_over_and_a_damaged_one_is_named(loop, folder):
    loop.run(folder, ("save", 6), KILL)
    (folder / f"{loop.prefix}98").mkdir()
    (folder / f"{loop.prefix}99").mkdir()
    (folder / f"{loop.prefix}99" / ".unsealed").touch()
    older, newest = loop.checkpoints(folder)[-2:]
    loop.damage(folder, newest)
    found = loop.run(folder)
    assert re.search(rf"{loop.prefix}{newest} is damaged: .* Taken instead: {loop.prefix}{older}\.", found.said)
    assert (found.code, found.digest) == (0, loop.whole().digest), found.said
    assert not any((folder / f"{loop.prefix}{number}").exists() for number in (98, 99))


def test_where_all_are_damaged_nothing_starts_over_silently(loop, folder):
    loop.run(folder, ("batch", 0, 5))
    steps = loop.checkpoints(folder)
    for step in steps:
        loop.damage(folder, step)
    found = loop.run(folder)
    assert found.code == 1 and "DamagedError" in found.said and "differs from its checksum" in found.said
    assert loop.checkpoints(folder) == steps


def test_a_stop_before_anything_was_trained_saves_nothing(loop, folder):
    found = loop.run(folder, ("begin", 0), **loop.early)
    assert found.code == 75, found.said
    assert "nothing was trained yet" in found.said and not loop.checkpoints(folder)
    loop.run(folder, ("batch", 0, 2))
    steps = loop.checkpoints(folder)
    again = loop.run(folder, ("begin", 0), **loop.early)
    assert again.code == 75 and "holds all steps so far" in again.said
    assert loop.checkpoints(folder) == steps
    assert loop.run(folder).digest == loop.whole().digest


def test_a_changed_setting_is_refused_by_name(loop, folder):
    loop.run(folder, ("batch", 1, 2))
    found = loop.run(folder, rate=5e-2)
    assert found.code == 1 and re.search(f"UsageError.*{loop.told}", found.said), found.said


@those_with("has_modes")
def test_a_setting_that_is_allowed_to_change_is_a_fork(loop, folder, events):
    loop.run(folder, ("batch", 1, 2))
    found = loop.run(folder, rate=5e-2, allow=("learning_rate",))
    assert found.code == 0 and found.digest != loop.whole().digest, found.said
    ((then, now),) = (event["changed"]["learning_rate"] for event in events("fork"))
    assert {*then, *now} == {0.01, 0.05}


def test_a_checkpoint_that_the_model_cannot_load_is_named(loop, folder):
    loop.run(folder, ("batch", 1, 2))
    found = loop.run(folder, width=9)
    assert found.code == 1 and re.search(rf"{loop.prefix}\d+ cannot be loaded: RuntimeError: ", found.said), found.said


def test_the_events_are_of_the_same_kinds(loop, folder, events):
    loop.run(folder, ("batch", 1, 1))
    (stop,), saved = events("stop"), events("checkpoint")
    assert (stop["signal"], stop["epoch"], stop["step"]) == ("SIGTERM", 1, 1)
    assert saved[-1]["step"] == 4 and saved[-1]["bytes"] > 999
    loop.run(folder)
    (resume,), epochs = events("resume"), events("epoch")
    assert (resume["epoch"], resume["step"]) == (1, 1)
    assert [(one["epoch"], one["num_epochs"]) for one in epochs] == [(1, 3), (2, 3), (3, 3)]
    assert all(0 < one["wait_share"] < 1 and one["samples_per_second"] > 0 for one in epochs)
    assert all(any(name.endswith("loss") and value > 0 for name, value in one.items()) for one in epochs)
    assert {"train", "validate", "checkpoint"} <= {event["phase"] for event in events("phase")}
    assert {"epoch": 1, "num_steps": 3}.items() <= events("step")[0].items()


@those_with("has_modes")
def test_watching_changes_nothing(loop, folder, events):
    assert loop.run(folder, mode="watch").digest == loop.whole(mode="plain").digest
    assert len(events("epoch")) == 3 and not loop.checkpoints(folder)
    (used,) = (event["settings"] for event in events("loaders"))
    assert used["workers"] == 0 and used["samples"] > 0


@those_with("has_modes")
def test_stop_alone_sees_each_sample_once_and_says_what_is_not_exact(loop, folder):
    unbroken = loop.whole(mode="stop")
    first = loop.run(folder, ("batch", 1, 2), mode="stop")
    second = loop.run(folder, mode="stop")
    assert (first.code, second.code) == (75, 0), first.said + second.said
    assert second.seen[:3] == unbroken.seen[7:10]
    assert "but not to the same bytes: the order goes on" in second.said


@those_with("streams")
@pytest.mark.parametrize(
    ("data", "told"),
    [(loops.Resumable, "the stream goes on where its state_dict says"), (loops.Stream, "8 samples are seen again")],
)
def test_a_stream_goes_on_by_its_state_or_is_seen_again_which_is_told(loop, folder, data, told):
    options = {"mode": "stop", "collate": loops.plain, "data": data()}
    unbroken = loop.run(folder.with_name("whole"), **options)
    loop.run(folder, ("batch", 1, 2), **options)
    found = loop.run(folder, **options)
    assert f"but not to the same bytes: {told}" in found.said
    assert found.seen == unbroken.seen[7 if data is loops.Resumable else 5 :]


@those_with("leaves")
def test_a_first_batch_of_a_step_that_is_not_wanted_loses_nothing(loop, folder):
    first = loop.run(folder, ("begin", 2), leaves=True)
    assert first.code == 75, first.said
    assert loop.run(folder, leaves=True).digest == loop.whole(leaves=True).digest != loop.whole().digest


def test_a_resume_that_is_not_exact_is_told_and_ends_unless_that_is_allowed(loop, folder, events):
    passes = []

    def grow(module, _, output):
        if module.training and isinstance(module, torch.nn.Linear):
            passes.append(module)
            return output * (1 + len(passes) / 1000)
        return output

    with register_module_forward_hook(grow):
        first = loop.run(folder, ("batch", 1, 2))
        told = loop.run(folder)
        again = loop.run(folder)
        warned = loop.run(folder, **({"allow": ("replay",)} if loop.has_modes else {"allow_inexact": True}))
    assert first.code == 75 and "2 steps more will be made again, to prove the resume" in first.said
    for found in (told, again):
        assert found.code == 1, found.said
        assert re.search(
            r"NOT exact: step 5 is not .* loss .* in place of .*, the batch and the rate the same", found.said
        )
    assert warned.code == 0, warned.said
    assert all("This resume is NOT exact: step 5 is" in event["text"] for event in events("inexact"))
    assert len(events("inexact")) == 3


def test_a_model_that_counts_its_passes_is_taken(loop, folder):
    def count(module, *_):
        vars(module)["passes"] = vars(module).get("passes", 0) + 1

    with register_module_forward_hook(count):
        found = loop.run(folder)
    assert (found.code, found.digest) == (0, loop.whole().digest), found.said


def test_one_process_trains_into_a_folder(loop, folder):
    others = []
    found = loop.run(folder, ("batch", 0, 2), lambda: others.append(loop.run(folder)))
    assert (found.code, found.digest) == (0, loop.whole().digest), found.said
    assert others[0].code == 1 and re.search(r"UsageError: Process \d+ trains into", others[0].said)
