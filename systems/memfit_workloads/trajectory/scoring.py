"""The rules: vocabulary, teacher table, baselines and metrics. Nothing here needs torch.

Trajectories are in metres in the frame of the scene's vehicle, one position every 1 / hz seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.pipeline import Context
from memfit.rundir import phase
from memfit_workloads.trajectory.data import SPLITS, Floats, cells, to_world
from memfit_workloads.trajectory.params import TrajectoryParams

Bools = npt.NDArray[np.bool_]
#: A vehicle of 5 m x 1.8 m is two discs of this radius, so far ahead of its middle and behind it. Metres.
_DISC_RADIUS, _DISC_AHEAD = 1.2, 1.25
#: More than this is no comfort, in m/s².
_MOST_ACCELERATION = 4.0
_MISS_METRES = 2.0
#: A turn is read off so many steps. So much is left of turn and acceleration after each step; best where it is trained.
_TURN_STEPS, _TURN_KEPT, _GAIN_KEPT = 3, 0.8, 0.9
#: Every so many positions are looked at for collisions, roads and comfort.
_EVERY = 2
_MOST_FOR_CLUSTERS = 50_000
METRICS = ("minADE1", "minFDE1", "minADE6", "minFDE6", "miss6", "collision", "off_road")


def vocabulary(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Cluster the futures that are trained on; save ``vocabulary``: ``paths`` (K, F, 2)."""
    phase("build")
    scenes = [unit.arrays("scenes") for unit in context.units("prepare")]
    futures = np.concatenate([one["future"][one["split"] == 0] for one in scenes])
    paths = cluster(futures, params.vocabulary.size, context.seed)
    context.save("vocabulary", {"paths": paths})
    return {"size": len(paths)}


def cluster(futures: Floats, size: int, seed: int) -> npt.NDArray[np.float32]:
    """Return the centres of k-means over futures (n, F, 2), shape (size or n, F, 2), by how far they lead."""
    from sklearn.cluster import MiniBatchKMeans

    picked = np.random.default_rng(seed).permutation(len(futures))[:_MOST_FOR_CLUSTERS]
    means = MiniBatchKMeans(min(size, len(picked)), batch_size=4096, n_init=1, max_iter=30, random_state=seed)
    means.fit(futures[picked].reshape(len(picked), -1).astype(np.float32))
    centres = means.cluster_centers_.reshape(-1, *futures.shape[1:]).astype(np.float32)
    order = np.argsort(np.hypot(centres[:, -1, 0], centres[:, -1, 1]), kind="stable")
    return np.asarray(centres[order])


def teach(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Score each entry of the vocabulary in each scene of a place; save ``teacher``, a table (S, 4, K) to be mapped."""
    phase("build")
    paths = context["vocabulary"].arrays("vocabulary")["paths"]
    scenes, road = context["prepare"].arrays("scenes"), context["prepare"].arrays("road")
    path = context.dir / "teacher.npy"
    shape = (len(scenes["future"]), 4, len(paths))
    table = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    for row in range(len(table)):
        table[row] = scores(paths, {name: each[row] for name, each in scenes.items()}, road, params.data.hz)
    table.flush()
    context.save("teacher", path)
    return {"bytes": int(table.nbytes), "means": [float(one) for one in table.mean((0, 2), dtype=np.float64)]}


def scores(paths: Floats, scene: Mapping[str, Floats], road: Mapping[str, Floats], hz: int) -> Floats:
    """Return how four teachers score paths (K, F, 2) in a scene, shape (4, K), 0 to 1.

    no collision; on the road; progress: metres from the start, as a share of the farthest path that is on the road and
    without a collision; comfort: no acceleration above 4 m/s².
    """
    safe = ~collides(paths, scene["neighbours"])
    on = on_road(paths, scene["pose"], road)
    reach = np.hypot(paths[:, -1, 0], paths[:, -1, 1])
    farthest = max(1.0, float(reach[safe & on].max(initial=0.0)))
    return np.stack([safe, on, np.minimum(1.0, reach / farthest), is_comfortable(paths, scene["history"], hz)])


def collides(paths: Floats, neighbours: Floats) -> Bools:
    """Return which paths (K, F, 2) of a middle that begins at the origin with heading 0 come too close, shape (K,).

    ``neighbours`` (N, F, 3) have x, y and heading in radians; NaN where there is none.
    """
    others = neighbours[~np.isnan(neighbours).all(axis=(1, 2)), _EVERY - 1 :: _EVERY]
    mine = _discs(paths, _headings(paths))[:, _EVERY - 1 :: _EVERY]
    theirs = _discs(others[..., :2], others[..., 2])
    hit = np.zeros(len(paths), bool)
    for step in range(mine.shape[1]):  # (K, 1, 2, 1, 2) - (N, 1, 2, 2)
        gap = ((mine[:, step, None, :, None] - theirs[:, step, None]) ** 2).sum(axis=-1)
        hit |= (gap < (2 * _DISC_RADIUS) ** 2).any(axis=(1, 2, 3))
    return hit


def _headings(paths: Floats) -> Floats:
    """Return the heading of each position of paths (K, F, 2); one that hardly moves keeps that of before."""
    steps = np.diff(paths, axis=1, prepend=0)
    found = np.arctan2(steps[..., 1], steps[..., 0])
    still = np.hypot(steps[..., 0], steps[..., 1]) < 0.05
    last = np.maximum.accumulate(np.where(still, -1, np.arange(paths.shape[1])), axis=1)
    return np.where(last < 0, 0.0, np.take_along_axis(found, np.maximum(last, 0), axis=1))


def _discs(points: Floats, headings: Floats) -> Floats:
    """Return the middles of a vehicle's two discs, shape (..., 2, 2)."""
    ahead = _DISC_AHEAD * np.stack([np.cos(headings), np.sin(headings)], axis=-1)
    return np.stack([points + ahead, points - ahead], axis=-2)


def on_road(paths: Floats, pose: Floats, road: Mapping[str, Floats]) -> Bools:
    """Return which paths (K, F, 2) stay on lanes with their middle, shape (K,)."""
    return np.asarray(road["grid"][cells(to_world(paths[:, _EVERY - 1 :: _EVERY], pose), road)].all(axis=1))


def is_comfortable(paths: Floats, history: Floats, hz: int) -> Bools:
    """Return which paths (K, F, 2) accelerate and turn softly, the step from the history (H, 2) included."""
    before = np.broadcast_to(history[[-1 - _EVERY, -1]], (len(paths), 2, 2))
    whole = np.concatenate([before, paths[:, _EVERY - 1 :: _EVERY]], axis=1)
    acceleration = np.diff(whole, n=2, axis=1) * (hz / _EVERY) ** 2
    return np.asarray(np.hypot(acceleration[..., 0], acceleration[..., 1]).max(axis=1) <= _MOST_ACCELERATION)


def constant_velocity(history: Floats, num_future: int) -> Floats:
    """Return the futures (S, 1, F, 2) of vehicles that go on as in the last step of histories (S, H, 2)."""
    steps = np.arange(1, num_future + 1)[:, None]
    return np.asarray((history[:, -1] - history[:, -2])[:, None, None] * steps)


def constant_turn(history: Floats, num_future: int) -> Floats:
    """Return the futures (S, 1, F, 2) of vehicles that turn and speed up as in their last steps; both die away."""
    steps, ahead = np.diff(history[:, -1 - _TURN_STEPS :], axis=1), np.arange(1, num_future + 1)
    speed, heading = np.hypot(*np.moveaxis(steps, 2, 0)), np.unwrap(np.arctan2(steps[..., 1], steps[..., 0]), axis=1)
    number = max(1, steps.shape[1] - 1)
    turn = np.where(speed.min(axis=1) < 0.05, 0.0, heading[:, -1] - heading[:, 0])[:, None] / number
    gain = (speed[:, -1] - speed[:, 0])[:, None] / number
    pace = np.maximum(0.0, speed[:, -1:] + gain * np.cumsum(_GAIN_KEPT**ahead))
    course = np.where(speed[:, -1:] < 0.05, 0.0, heading[:, -1:]) + turn * np.cumsum(_TURN_KEPT**ahead)
    return np.cumsum(pace[..., None] * np.stack([np.cos(course), np.sin(course)], axis=-1), axis=1)[:, None]


def judge(predicted: Floats, scenes: Mapping[str, Floats], road: Mapping[str, Floats]) -> Floats:
    """Return `METRICS` of each scene, shape (S, 7), of predictions (S, k, F, 2), the best first.

    Distances in metres; ``miss6`` is 1 where no end of six is within 2 m; collision and off-road are of the first.
    """
    error = np.linalg.norm(predicted - scenes["future"][:, None], axis=-1).astype(np.float64)
    mean, end = error.mean(-1), error[..., -1]
    nearest, first = end[:, :6].min(1), predicted[:, :1]
    hits = [collides(*one)[0] for one in zip(first, scenes["neighbours"], strict=True)]
    leaves = [not on_road(*one, road)[0] for one in zip(first, scenes["pose"], strict=True)]
    columns = (mean[:, 0], end[:, 0], mean[:, :6].min(1), nearest, nearest > _MISS_METRES, hits, leaves)
    return np.stack(columns, axis=1)


def report(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Judge all seeds, baselines and what was driven on scenes that nothing was trained on."""
    phase("validate")
    paths, found = context["vocabulary"].arrays("vocabulary")["paths"], dict[str, Any]()
    for split in SPLITS[2:]:
        judged = _judge_split(context, split, paths)
        if judged["driven"].size:
            means = {name: dict(zip(METRICS, one.mean((0, 1)).tolist(), strict=True)) for name, one in judged.items()}
            found[split] = {"metrics": means, "num_scenes": judged["driven"].shape[1]}
    context.save("metrics", found)
    flat = {f"{split}_{name}": one["metrics"]["model"][name] for split, one in found.items() for name in METRICS[:5]}
    return flat | {"report": [line for split, one in found.items() for line in _lines(split, one)]}


def _judge_split(context: Context, split: str, paths: Floats) -> dict[str, Floats]:
    """Return `METRICS` of model (seeds, S, 7) and baselines (1, S, 7)."""
    seeds, start = [unit.arrays("chosen")[split] for unit in context.units("choose")], 0
    parts = {one: list[Floats]() for one in ("model", "constant_velocity", "constant_turn", "driven")}
    for unit in context.units("prepare"):
        stored, road = unit.arrays("scenes"), unit.arrays("road")
        rows = np.flatnonzero(stored["split"] == SPLITS.index(split))
        scenes = {name: stored[name][rows] for name in ("history", "future", "neighbours", "pose")}
        chosen = [paths[one[start : start + len(rows)]] for one in seeds]
        straight, turned = (make(scenes["history"], paths.shape[1]) for make in (constant_velocity, constant_turn))
        predicted = (chosen, [straight], [turned], [scenes["future"][:, None]])
        for part, each in zip(parts.values(), predicted, strict=True):
            part.append(np.stack([judge(one, scenes, road) for one in each]))
        start += len(rows)
    return {name: np.concatenate(each, axis=1) for name, each in parts.items()}


def _lines(split: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{split.replace('_', ' ')}, {found['num_scenes']} scenes: " + ", ".join(METRICS)
    for name, one in found["metrics"].items():
        yield f"  {name.replace('_', ' ')}: " + ", ".join(f"{one[metric]:.3f}" for metric in METRICS)
