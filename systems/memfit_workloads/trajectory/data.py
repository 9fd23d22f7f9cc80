"""Cut scenes from simulated traffic on the road networks of installed packages, and keep them in mapped arrays.

`prepare` saves for a place, with S scenes, H positions of history and F of the future, N neighbours, all in metres in
the frame of the scene's own vehicle (x ahead, y to the left, the origin where it is now):

==========  =======================  ==================================================================
scenes      history (S, H, 2)        float32; the last is the origin
\\           raster (S, 3, R, R)      uint8: road, its direction, vehicles; row 0 is farthest ahead
\\           future (S, F, 2)         float32
\\           neighbours (S, N, F, 3)  float32: x, y, heading in radians; NaN where there is none
\\           pose (S, 3)              float64: x, y, heading in the network
\\           split, block (S,)        int8: `SPLITS`; int32: scenes of one block are alike
road        grid, origin, cell       uint8 0 or 1 by (row, column); metres of its first corner, of a cell
==========  =======================  ==================================================================

`Scenes` reads one split of them, with the rows of the teacher table, as items for a ``DataLoader``.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import io
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import ConfigError, MissingExtraError
from memfit.pipeline import Context
from memfit.rundir import phase
from memfit_workloads.trajectory.params import DataParams, TrajectoryParams

Floats = npt.NDArray[np.floating[Any]]
Arrays = dict[str, npt.NDArray[Any]]
SPLITS = ("train", "valid", "test", "held_out")
#: What a network may name as inputs.
INPUTS = ("history", "raster")
#: Where packages keep networks. Those of eclipse-sumo are of OpenStreetMap.
_FOLDERS = (("sumolib", "scenario/scenarios"), ("sumo", "tools/game"))
_ROAD_CELL, _MARGIN = 0.5, 80.0
#: A scene whose vehicle moves less than so many metres teaches nothing.
_LEAST_METRES = 1.0
_NEAR_METRES = 50.0


def check(params: TrajectoryParams) -> None:
    """Refuse a package or a place that is not there, before the first job."""
    for package in ("libsumo", "sumo"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError.of(package, "trajectory", "the trajectory model", "memfit-systems")
    for place in params.data.places:
        find_network(place)


def find_network(place: str) -> Path:
    """Return the file of a place: that of a path, or of a folder of this name in an installed package."""
    if ".net.xml" in place and Path(place).is_file():
        return Path(place)
    known: dict[str, Path] = {}
    for package, folder in _FOLDERS:
        files = Path(str(importlib.resources.files(package)), folder).rglob("*.net.xml*")
        known = {one.parent.name: one for one in sorted(files, reverse=True)} | known
    if place not in known:
        raise ConfigError(
            f"the place {place} is not there.",
            rule="a place is a path of a .net.xml file, or a network of an installed package.",
            remedy=f"name one of {', '.join(sorted(known))}",
        )
    return known[place]


def prepare(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Simulate the traffic of a place, and save its scenes and its road."""
    phase("load")
    place, data = context.unit, params.data
    network, rng = find_network(place), np.random.default_rng([context.seed, zlib.crc32(place.encode())])
    found: list[Arrays] = []
    phase("build")
    blocks = (one for _ in range(data.simulations) for one in simulate(network, data, int(rng.integers(1 << 30))))
    for number, (road, tracks) in enumerate(blocks):
        found += [one | {"block": np.array(number, np.int32)} for one in cut(tracks, road, data)]
    if not found:
        raise ConfigError(
            f"{place} has no scene.",
            rule="a scene needs a vehicle that drives for history and future.",
            remedy="--set params.data.seconds=200, or more of params.data.vehicles_per_minute",
        )
    arrays = {name: np.stack([one[name] for one in found]) for name in found[0]}
    num_blocks = data.simulations * int(data.seconds // data.block_seconds)
    splits, order = np.full(num_blocks, 3 if place in data.held_out else 0), rng.permutation(num_blocks)
    if place not in data.held_out:
        num_valid, num_test = (max(1, round(num_blocks * share)) for share in (data.valid_share, data.test_share))
        splits[order[:num_valid]], splits[order[num_valid : num_valid + num_test]] = 1, 2
    arrays["split"] = splits[arrays["block"]].astype(np.int8)
    context.save("scenes", arrays)
    context.save("road", {name: road[name] for name in ("grid", "origin", "cell")})
    counts = np.bincount(arrays["split"], minlength=len(SPLITS)).tolist()
    return {"num_scenes": len(found)} | dict(zip(SPLITS, counts, strict=True))


def draw_road(lanes: Sequence[tuple[Floats, float]]) -> Arrays:
    """Return where lanes lie, as a fine grid: ``grid`` and ``direction`` in radians by cell, ``origin``, ``cell``.

    A lane is the points of its centre line, shape (n, 2) in metres, and its width.
    """
    points = np.concatenate([shape for shape, _ in lanes])
    origin = points.min(axis=0) - _MARGIN
    columns, rows = np.ceil((points.max(axis=0) + _MARGIN - origin) / _ROAD_CELL).astype(int)
    grid, direction = np.zeros((rows, columns), np.uint8), np.zeros((rows, columns), np.float32)
    road = {"grid": grid, "direction": direction, "origin": origin, "cell": np.array(_ROAD_CELL)}
    for shape, width in lanes:
        aside = np.arange(-width / 2, width / 2 + 1e-6, _ROAD_CELL / 2)
        for start, end in itertools.pairwise(shape):
            length = float(np.hypot(*(end - start)))
            if length == 0:
                continue
            along = (end - start) / length
            at = start + np.arange(0, length + 1e-6, _ROAD_CELL / 2)[:, None] * along
            here = cells(at[:, None] + aside[:, None] * np.array([-along[1], along[0]]), road)
            grid[here], direction[here] = 1, np.arctan2(along[1], along[0])
    return road


def cells(points: Floats, road: Mapping[str, Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return row and column of points (..., 2) in a road's grid; points outside are of its empty edge."""
    found, (rows, columns) = np.floor((points - road["origin"]) / road["cell"]).astype(np.int64), road["grid"].shape
    return np.clip(found[..., 1], 0, rows - 1), np.clip(found[..., 0], 0, columns - 1)


def draw_raster(road: Arrays, pose: Floats, data: DataParams) -> npt.NDArray[np.uint8]:
    """Return road and direction around a pose, shape (3, R, R); the channel of vehicles is empty.

    A quarter lies behind the pose. Direction is 128 and up to 127 more along the pose's heading, less against it.
    """
    number = np.arange(data.raster_size) + 0.5
    ahead, left = ((share * data.raster_size - number) * data.raster_cell for share in (0.75, 0.5))
    here = cells(to_world(np.stack(np.meshgrid(ahead, left, indexing="ij"), axis=-1), pose), road)
    on, agree = road["grid"][here], np.cos(road["direction"][here] - pose[2])
    found = np.zeros((3, *on.shape), np.uint8)
    found[0], found[1] = 255 * on, np.where(on, np.round(128 + 127 * agree), 0)
    return found


def to_world(points: Floats, pose: Floats) -> Floats:
    """Return points (..., 2) of a vehicle's frame in the network; pose (3,) is x, y, heading."""
    cos, sin = np.cos(pose[2]), np.sin(pose[2])
    return np.asarray(points @ np.array([[cos, sin], [-sin, cos]]) + pose[:2])


def to_frame(points: Floats, pose: Floats) -> Floats:
    """Return points (..., 2) of the network in a vehicle's frame."""
    cos, sin = np.cos(pose[2]), np.sin(pose[2])
    return np.asarray((points - pose[:2]) @ np.array([[cos, -sin], [sin, cos]]))


def simulate(network: Path, data: DataParams, seed: int) -> Iterator[tuple[Arrays, Floats]]:
    """Yield the road and the tracks of each block of time, shape (steps, vehicles, 3): x, y, heading; NaN where absent.

    Vehicles set out at an even pace on random routes. libsumo holds one simulation in a process at a time.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it thinks of pyarrow
        import libsumo
    options = ("--step-length", str(data.step), "--seed", str(seed), "--no-step-log", "true", "--no-warnings", "true")
    libsumo.start(["sumo", "-n", str(network), *options])
    try:
        lane = libsumo.lane
        lanes = [one for one in lane.getIDList() if "passenger" in (lane.getAllowed(one) or ("passenger",))]
        road = draw_road([(np.array(lane.getShape(one)), lane.getWidth(one)) for one in lanes])
        edges = sorted({lane.getEdgeID(one) for one in lanes if not one.startswith(":")})
        pairs = list(itertools.permutations(edges, 2))
        picked = [pairs[at] for at in np.random.default_rng(0).permutation(len(pairs))[:400]]
        found = [tuple(libsumo.simulation.findRoute(*pair, "DEFAULT_VEHTYPE").edges) for pair in picked]
        routes = sorted(route for route in found if len(route) > 1)
        rng, every = np.random.default_rng(seed), max(1, round(1 / data.hz / data.step))
        num_seen = round(data.block_seconds * data.hz)
        pace, due = data.vehicles_per_minute / 60 * data.step, 0.0
        for _ in range(int(data.seconds // data.block_seconds)):
            seen: list[dict[str, tuple[float, float, float]]] = []
            for number in range(num_seen * every):
                due += pace
                while due >= 1:
                    name = f"{libsumo.simulation.getTime():.3f}_{due:.3f}"
                    libsumo.route.add(name, routes[rng.integers(len(routes))])
                    libsumo.vehicle.add(name, name, departSpeed="max", departLane="best")
                    due -= 1
                libsumo.simulationStep()
                if number % every == every - 1:
                    seen.append({one: _centre(libsumo.vehicle, one) for one in libsumo.vehicle.getIDList()})
            names = sorted({name for one in seen for name in one})
            absent = (np.nan, np.nan, np.nan)
            yield road, np.array([[one.get(name, absent) for name in names] for one in seen]).reshape(num_seen, -1, 3)
    finally:
        libsumo.close()


def _centre(vehicles: Any, name: str) -> tuple[float, float, float]:
    """Return middle and heading of a vehicle; the simulator has its front, and degrees clockwise from north."""
    (x, y), heading = vehicles.getPosition(name), np.radians(90 - vehicles.getAngle(name))
    half = vehicles.getLength(name) / 2
    return x - half * np.cos(heading), y - half * np.sin(heading), heading


def cut(tracks: Floats, road: Arrays, data: DataParams) -> Iterator[Arrays]:
    """Yield the scenes of a block: history, raster, future, neighbours, pose."""
    now, whole = data.num_history - 1, data.num_history + data.num_future
    for start in range(0, len(tracks) - whole + 1, max(1, round(data.stride_seconds * data.hz))):
        window = tracks[start : start + whole]
        is_there = ~np.isnan(window).any(axis=(0, 2))
        moves = np.hypot(*(window[-1, :, :2] - window[now, :, :2]).T) > _LEAST_METRES
        for own in np.flatnonzero(is_there & moves):
            pose = window[now, own].astype(np.float64)
            path = to_frame(window[:, own, :2], pose).astype(np.float32)
            distance = np.hypot(*(window[now, :, :2] - pose[:2]).T)
            distance[own] = np.nan
            near = [one for one in np.argsort(distance)[: data.num_neighbours] if distance[one] < _NEAR_METRES]
            others = np.full((data.num_neighbours, data.num_future, 3), np.nan, np.float32)
            others[: len(near), :, :2] = to_frame(window[now + 1 :, near, :2], pose).swapaxes(0, 1)
            others[: len(near), :, 2] = (window[now + 1 :, near, 2] - pose[2]).T
            raster = draw_raster(road, pose, data)
            for when, level in ((max(0, now - data.hz), 128), (now, 255)):
                draw(raster[2], to_frame(window[when, near, :2], pose), level, data)
            yield {"history": path[: now + 1], "raster": raster, "future": path[now + 1 :],
                   "neighbours": others, "pose": pose}  # fmt: skip


def draw(channel: npt.NDArray[np.uint8], points: Floats, level: int, data: DataParams) -> None:
    """Mark points (n, 2) of a vehicle's frame in a channel of its raster; those outside or absent are left out."""
    size, cell = data.raster_size, data.raster_cell
    points = np.array([0.75 * size, 0.5 * size]) - points[~np.isnan(points).any(axis=1)] / cell
    row, column = np.floor(points).astype(int).T
    inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
    channel[row[inside], column[inside]] = level


class Scenes:
    """The scenes of one of `SPLITS`, in all places, as items: history, raster, future, and the teachers' scores (4, K).

    All is mapped: any number of ranks and workers share one copy. A pickled one is its paths: for each place the folder
    of its scenes, and its teacher table (a ``.npy`` file).
    """

    NAMES = ("history", "raster", "future")

    def __init__(self, places: Sequence[tuple[Path, Path]], split: str) -> None:
        self.places, self.split = [*places], split

    def __getstate__(self) -> dict[str, Any]:
        return {"places": self.places, "split": self.split}

    @cached_property
    def arrays(self) -> list[Arrays]:
        """The arrays of each place, mapped: those of `NAMES`, and ``teacher`` (S, 4, K)."""
        return [
            {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in self.NAMES}
            | {"teacher": np.load(table, mmap_mode="r")}
            for folder, table in self.places
        ]

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """Place and row of each item, shape (n, 2)."""
        number = SPLITS.index(self.split)
        found = [np.flatnonzero(np.load(folder / "split.npy") == number) for folder, _ in self.places]
        places = np.repeat(np.arange(len(found)), [len(one) for one in found])
        return np.stack([places, np.concatenate(found)], axis=1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        place, row = self.rows[index]
        arrays = self.arrays[place]
        return tuple(np.array(arrays[name][row]) for name in (*self.NAMES, "teacher"))
