"""The trajectory model: scenes, teachers, metrics and baselines by hand; a whole run; ranks that are killed."""

import importlib.util
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from memfit import run
from memfit.errors import ConfigError, MissingExtraError
from memfit.pipeline import Output
from memfit_workloads.trajectory import data, scoring, training
from memfit_workloads.trajectory.params import DataParams, ModelParams, TrajectoryParams

SMALL = {
    "data": {"places": ["RiLSA_example1", "bs3d"], "held_out": ["bs3d"], "simulations": 1,
             "seconds": 80, "stride_seconds": 4, "raster_size": 16, "raster_cell": 4},
    "vocabulary": {"size": 12},
    "model": {"width": 8},
    "dataloader": {"params": {"batch_size": 16}},
    "trainer": {"params": {"max_epochs": 2}},
    "seeds": 1,
}  # fmt: skip
needs_simulator = pytest.mark.skipif(
    None in (importlib.util.find_spec("libsumo"), importlib.util.find_spec("sumo")),
    reason="libsumo or eclipse-sumo is not installed: pip install './systems[trajectory]'",
)


def lanes(*ys, backwards=()):
    """A road of lanes along x, 3 m wide, at these y; some lead the other way."""
    ends = np.array([[-50.0, 0.0], [150.0, 0.0]])
    return data.draw_road([((ends[::-1] if y in backwards else ends) + [0, y], 3.0) for y in ys])


def straight(speed, *, y=0.0, num=20, hz=5):
    return np.stack([speed / hz * np.arange(1, num + 1), np.full(num, y)], axis=1)


def test_a_raster_shows_road_direction_and_vehicles_in_the_frame_of_its_vehicle():
    road, params = lanes(0.0, 4.0, backwards=(4.0,)), DataParams(raster_size=16, raster_cell=2.0)
    east = data.draw_raster(road, np.array([0.0, 0.0, 0.0]), params)
    # columns from left to right: the first is 15 m to the left, those beside the origin are 1 m away
    assert (east[0][:, [5, 6, 7, 8]] == [255, 255, 255, 255]).all() and not east[0][:, 9:].any()
    assert (east[1][:, 7] == 255).all() and (east[1][:, 5] == 1).all() and (east[1][:, 9] == 0).all()
    west = data.draw_raster(road, np.array([0.0, 4.0, np.pi]), params)
    assert (west[0] == east[0]).all() and (west[1] == east[1]).all()
    data.draw(east[2], np.array([[23.0, 0.5], [-7.0, -15.0], [25.0, 0.0], [np.nan, 0.0]]), 200, params)
    assert np.argwhere(east[2]).tolist() == [[0, 7], [15, 15]] and east[2].max() == 200


def test_scenes_are_cut_where_a_vehicle_is_there_and_moves():
    params = DataParams(hz=1, num_history=3, num_future=3, stride_seconds=1, num_neighbours=2)
    tracks = np.full((7, 4, 3), np.nan)
    tracks[:, 0] = [[10.0 + 5 * t, 0.0, 0.0] for t in range(7)]
    tracks[:, 1] = [20.0, 4.0, np.pi]  # stands: no scene, and a neighbour
    tracks[2:6, 2] = [[0.0, 0.0, 0.0]] * 4  # not there for long enough
    tracks[:, 3] = [[900.0, -5.0 * t, -np.pi / 2] for t in range(7)]  # too far away to be a neighbour
    found = list(data.cut(tracks, lanes(0.0), params))
    assert len(found) == 4
    first, turned = found[0], found[1]
    assert first["history"].tolist() == [[-10, 0], [-5, 0], [0, 0]] and first["future"][:, 0].tolist() == [5, 10, 15]
    assert first["neighbours"][0, 0].tolist() == pytest.approx([0.0, 4.0, np.pi])
    assert first["neighbours"][1, 0].tolist() == pytest.approx([-20.0, 0.0, 0.0])
    assert np.isnan(found[2]["neighbours"][1, 2]).all()  # it has left by then
    assert turned["future"] == pytest.approx(first["future"], abs=1e-4) and np.isnan(turned["neighbours"]).all()


def test_teachers_score_collision_road_progress_and_comfort():
    paths = np.stack([straight(10), straight(20), straight(10, y=6.0), straight(5)])
    history = np.stack([straight(10, num=11)[:, 0] - 22.0, np.zeros(11)], axis=1)
    other = np.full((2, 20, 3), np.nan)
    other[0] = [30.0, 0.0, np.pi / 2]  # stands across the lane, 30 m ahead
    scene = {"history": history, "neighbours": other, "pose": np.zeros(3)}
    safe, on, progress, comfort = scoring.scores(paths, scene, lanes(0.0), 5)
    assert safe.tolist() == [0, 0, 1, 1] and on.tolist() == [1, 1, 0, 1]
    assert progress.tolist() == [1, 1, 1, 1]  # 20 m are the farthest of the one that is safe and on the road
    assert comfort.tolist() == [1, 0, 0, 0]  # 10 m/s goes on; the others jump to another speed or lane
    free = scoring.scores(paths, scene | {"neighbours": np.full((2, 20, 3), np.nan)}, lanes(0.0), 5)
    assert free[0].all() and free[2].tolist() == [0.5, 1.0, pytest.approx(0.5056, abs=1e-3), 0.25]


def test_two_vehicles_pass_each_other_in_lanes_and_touch_where_they_overlap():
    path, other = straight(10)[None], np.zeros((1, 20, 3))
    other[0, :, 0], other[0, :, 2] = 40.0 - straight(10)[:, 0], np.pi  # comes towards it
    for y, expected in ((3.2, False), (2.0, True), (0.0, True)):
        other[0, :, 1] = y
        assert scoring.collides(path, other).tolist() == [expected]


def test_metrics_of_six_predictions_by_hand():
    true = straight(10)
    predicted = np.stack([true + np.array(one) for one in ((3.0, 4.0), (0.0, 1.0), *[50.0] * 4)])[None]
    scenes = {"future": true[None], "neighbours": np.full((1, 1, 20, 3), np.nan), "pose": np.zeros((1, 3))}
    (found,) = scoring.judge(predicted, scenes, lanes(0.0)).tolist()
    assert dict(zip(scoring.METRICS, found, strict=True)) == {
        "minADE1": 5, "minFDE1": 5, "minADE6": 1, "minFDE6": 1, "miss6": 0, "collision": 0, "off_road": 1
    }  # fmt: skip
    assert scoring.judge(predicted[:, [0, 2, 3]], scenes, lanes(0.0))[0, 3:5].tolist() == [5, 1]


def test_a_turn_and_a_speeding_up_go_on_in_the_last_direction_and_die_away():
    angle, speed = np.radians([0.0, 2.0, 4.0]), np.array([1.0, 1.1, 1.2])
    steps = np.stack([speed * np.cos(angle), speed * np.sin(angle)], axis=1)
    history = np.concatenate([[[0.0, 0.0]], np.cumsum(steps, axis=0)])[None]
    ((found,),) = scoring.constant_turn(np.concatenate([history, 0 * history]), 30)[:1]
    first, last = np.diff(found, axis=0)[[0, -1]]
    assert np.degrees(np.arctan2(*first[::-1])) == pytest.approx(4 + 2 * (0.8 + 0.64)) and np.hypot(*first) > 1.2
    assert np.degrees(np.arctan2(*last[::-1])) == pytest.approx(12, abs=0.1)  # 4 + 2 x 0.8 / (1 - 0.8)
    assert scoring.constant_turn(0 * history, 30) == pytest.approx(0)  # it stands


def test_the_vocabulary_holds_centres():
    speeds = np.repeat([2.0, 10.0, 20.0], 30)
    futures = np.stack([straight(one) for one in speeds])
    paths = scoring.cluster(futures, 3, seed=1)
    assert np.allclose(paths, [straight(2), straight(10), straight(20)], atol=1e-4)
    assert len(scoring.cluster(futures[:4], 16, seed=1)) == 4


def test_scenes_are_read_from_maps_by_split_and_a_pickle_is_their_paths(tmp_path):
    places = []
    for place in range(2):
        folder = tmp_path / str(place)
        folder.mkdir()
        for name, shape in (("history", (3, 11, 2)), ("raster", (3, 3, 16, 16)), ("future", (3, 20, 2))):
            np.save(folder / f"{name}.npy", np.full(shape, place))
        np.save(folder / "split.npy", np.array([0, 1, place], np.int8))
        np.save(folder / "teacher.npy", np.arange(3 * 4 * 8.0).reshape(3, 4, 8) + 1000 * place)
        places.append((folder, folder / "teacher.npy"))
    train, valid = data.Scenes(places, "train"), data.Scenes(places, "valid")
    assert (len(train), len(valid)) == (3, 3)
    assert train.rows.tolist() == [[0, 0], [0, 2], [1, 0]] and valid[2][3][0, 0] == 1064 and valid[2][0][0, 0] == 1
    assert all(isinstance(one, np.memmap) for arrays in train.arrays for one in arrays.values())
    assert len(pickle.dumps(train)) < 1000 and len(pickle.loads(pickle.dumps(train))) == 3


def test_the_loss_wants_the_near_entries_and_what_the_teachers_say():
    class Fixed(torch.nn.Module):
        vocabulary = torch.zeros(2, 1, 2)
        vocabulary[1, 0, 0] = 100.0

        def __init__(self, scores):
            super().__init__()
            self.scores = torch.tensor(scores)

        def forward(self, history, raster):
            return self.scores.expand(len(history), 5, 2)

    batch = [torch.zeros(3, 4, 2), torch.zeros(3, 1), torch.zeros(3, 1, 2), torch.tensor([1.0, 0.0]).expand(3, 4, 2)]
    plain, right = [[0.0, 0.0]] * 5, [[9.0, -9.0]] * 5
    total, weight = training.scorer_loss(ModelParams(), Fixed(plain), batch)
    assert weight == 3 and total.item() == pytest.approx(3 * 2 * np.log(2), rel=1e-5)
    assert training.scorer_loss(ModelParams(), Fixed(right), batch)[0] < 0.01
    half = training.scorer_loss(ModelParams(teacher_weight=0.5), Fixed(plain), batch)[0]
    assert half.item() == pytest.approx(3 * 1.5 * np.log(2), rel=1e-5)


def test_what_cannot_be_is_refused(monkeypatch):
    for own, why in (({"block_seconds": 6.0}, "within one block"), ({"held_out": ["none"]}, "some of places")):
        with pytest.raises(ValueError, match=why):
            TrajectoryParams.model_validate({"data": own})
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libsumo" else find(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit-systems\[trajectory\]'"):
        data.check(TrajectoryParams())


@needs_simulator
def test_a_place_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="RiLSA_example1"):
        data.find_network("Nowhere")


@pytest.mark.slow
@needs_simulator
def test_a_whole_run_splits_by_block_and_place_and_judges_beside_baselines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = {"schema_version": 1, "experiment": "t", "target": "memfit_workloads.trajectory.stages:TRAJECTORY"}
    Path("config.yaml").write_text(json.dumps(text | {"seed": 1, "params": SMALL}))
    result = run("config.yaml")
    assert result.state == "completed"
    left = result.path / "checkpoints"
    own, held = (Output(left / f"prepare_{one}.json").arrays("scenes") for one in ("RiLSA_example1", "bs3d"))
    by_split = [set(own["block"][own["split"] == number].tolist()) for number in range(4)]
    assert all(by_split[:3]) and not by_split[3] and len(set.union(*by_split)) == sum(map(len, by_split))
    assert (held["split"] == 3).all()
    table = np.load(Output(left / "teacher_RiLSA_example1.json").path("teacher"), mmap_mode="r")
    assert table.shape == (len(own["split"]), 4, 12) and table.min() >= 0 and table.max() == 1
    metrics = Output(left / "stage_report.json").json("metrics")
    assert set(metrics) == {"test", "held_out"}
    for one in metrics.values():
        assert set(one["metrics"]) == {"model", "constant_velocity", "constant_turn", "driven"}
        assert one["metrics"]["driven"]["minADE1"] == 0
        assert one["metrics"]["model"]["minADE6"] <= one["metrics"]["model"]["minADE1"]
    assert Output(left / "choose_1.json").result["num_held_out"] == len(held["split"])
