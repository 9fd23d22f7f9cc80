"""From files to batches: find the videos, deal the folds, decode each video once. Loads no torch."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.errors import ConfigError, DataError, MissingExtraError, SplitError
from memfit.pipeline import Context, fingerprint_files
from memfit.rundir import phase, record
from memfit_workloads import own
from memfit_workloads.video.alike import frame_signatures, group_alike
from memfit_workloads.video.clips import make_clips
from memfit_workloads.video.decode import BadVideoError, decoder_version, probe, sample_frames
from memfit_workloads.video.groups import StratifiedGroups
from memfit_workloads.video.params import DataParams, VideoParams

Changes = Mapping[int, Sequence[Mapping[str, Any]]]
_ENDINGS = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".3gp", ".flv", ".wmv", ".ogv"})
SIGNED_FRAMES, SIGNED_SIZE = 8, 72
#: A class has a name in the table and a number in the model; in this order where these are the names.
_KNOWN_CLASSES = ("real", "tampered")


def fingerprint(params: VideoParams) -> str:
    """Return a digest of the user's own videos; the samples follow from the settings."""
    path = params.data.path
    if path is None:
        return decoder_version()
    files = [one for one, *_ in find_videos(params.data) if one.is_file()]
    return fingerprint_files(*([path] if path.is_file() else []), *files) + decoder_version()


def check(params: VideoParams) -> None:
    """Refuse videos that no folds can be made of, and a notebook that cannot run."""
    if importlib.util.find_spec("av") is None:
        raise MissingExtraError.of("av", "video", "a video", "memfit-systems")
    if params.entry == "notebook" and importlib.util.find_spec("nbclient") is None:
        raise MissingExtraError.of("nbclient", "video", "entry: notebook", "memfit-systems")
    clip, labels = params.clip, [label for _, label, _ in find_videos(params.data)] if params.data.path else []
    labels = labels or [_KNOWN_CLASSES[number % 2] for number in range(params.data.num_clips)]
    outputs, shape = num_outputs(_classes(set(labels))), (2, clip.num_frames, 3, clip.size, clip.size)
    sizes = {"num_outputs": outputs, "num_frames": clip.num_frames, "size": clip.size}
    own.try_out(params.model, lambda: own.build(params.model, **sizes), {"frames": ("uint8", shape)}, (2, outputs))
    splits = params.splits
    splitter = StratifiedGroups(splits.n_splits, splits.test_share)
    try:  # each video alone: groups of several leave fewer to deal
        next(splitter.split(labels, np.arange(len(labels))))
    except SplitError as error:
        remedy = f"--set params.splits.n_splits=..., --set params.splits.test_share=...; {error.remedy}"
        raise ConfigError(error.what, rule=error.rule, remedy=remedy) from None


def load_data(context: Context, params: VideoParams) -> dict[str, Any]:
    """List the videos with their classes, and the groups of those that look alike; name those that are damaged."""
    phase("load")
    settings = params.data
    listed = find_videos(settings, context.dir / "clips")
    if settings.source == "samples":
        context.save("clips", context.dir / "clips")
    rows, signatures, skipped = [], [], []
    for path, label, group in listed:
        try:
            info = probe(path)
            signatures.append(frame_signatures(sample_frames(path, SIGNED_FRAMES, SIGNED_SIZE)))
        except BadVideoError as error:
            skipped.append({"path": str(path), "label": label, "why": str(error)})
            record("skipped_video", path=str(path), why=str(error))
            continue
        with open(path, "rb") as file:
            item = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        shown = str(path.relative_to(context.dir)) if path.is_relative_to(context.dir) else str(path.resolve())
        rows.append({"path": shown, "label": label, "item": item, "own_group": group, **asdict(info)})
    if len(skipped) > settings.most_bad * len(listed):
        raise DataError(
            f"{len(skipped)} of {len(listed)} videos are damaged; {skipped[0]['path']}: {skipped[0]['why']}.",
            rule=f"at most {settings.most_bad:.0%} are skipped (params.data.most_bad).",
            remedy="replace the damaged files, or raise that share",
        )
    classes = _classes({row["label"] for row in rows})
    groups = group_alike(np.stack(signatures), [row["own_group"] for row in rows])
    table = pa.Table.from_pylist([row | {"class": classes.index(row["label"])} for row in rows])
    context.save("videos", table.append_column("group", pa.array(groups)))
    context.save("skipped", skipped)
    return {
        "num_videos": len(rows),
        "num_skipped": len(skipped),
        "num_groups": len(np.unique(groups)),
        "classes": classes,
        "decoder": decoder_version(),
    }


def find_videos(settings: DataParams, folder: Path = Path()) -> list[tuple[Path, str, str]]:
    """Return path, class and group of each video.

    The samples are made in ``folder``. One's own lie in a folder for each class, or are the lines of a CSV.
    """
    path = settings.path
    if path is None:
        made = make_clips(folder, settings.num_clips, seconds=settings.seconds, bad_share=settings.bad_share)
        return [(folder / row["path"], row["label"], row["segment"]) for row in made.to_pylist()]
    if path.is_dir():
        found = [one for one in sorted(path.glob("*/**/*")) if one.suffix.lower() in _ENDINGS and one.is_file()]
        listed = [(one, one.relative_to(path).parts[0], "") for one in found]
    else:
        try:
            lines = list(csv.DictReader(path.read_text().splitlines()))
            listed = [(path.parent / one["path"], one["label"], one.get("group") or "") for one in lines]
        except (OSError, KeyError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read as a list of videos: {error!r}.",
                rule="it is a folder with one folder for each class, or a CSV with the columns path and label.",
                remedy="begin the file with the line: path,label,group; or name another: --set params.data.path=...",
            ) from None
    if not listed:
        raise DataError(
            f"there is no video in {path}.",
            rule=f"a video ends in one of {', '.join(sorted(_ENDINGS))} and lies in a folder named after its class.",
            remedy="name the folder above the folders of the classes, or a CSV: --set params.data.path=...",
        )
    return listed


def _classes(names: set[str]) -> list[str]:
    if len(names) < 2:
        raise DataError(
            f"the videos have one class: {', '.join(names)}.",
            rule="the model tells two classes or more apart.",
            remedy="give each video its label, or name others: --set params.data.path=...",
        )
    return list(_KNOWN_CLASSES) if names == set(_KNOWN_CLASSES) else sorted(names)


def num_outputs(classes: Sequence[str]) -> int:
    """Return how many numbers a network returns for a video: the log-odds of the second class, or one for each."""
    return 1 if len(classes) == 2 else len(classes)


def create_kfold_splits(context: Context, params: VideoParams) -> dict[str, Any]:
    """Put the test set aside and deal the folds, whole groups each; save which video is in which."""
    videos = context["load_data"].table("videos")
    classes = videos["class"].to_numpy()
    groups = videos["group"].to_numpy() if params.splits.grouped else np.arange(len(classes))
    splitter = StratifiedGroups(params.splits.n_splits, params.splits.test_share, context.seed)
    _, test = splitter.hold_out(classes, groups)
    fold = np.zeros(len(classes), dtype=np.int64)
    folds = []
    for number, (train, valid) in enumerate(splitter.split(classes, groups), start=1):
        fold[valid] = number
        folds.append({"fold": number, "num_train": len(train), "num_valid": len(valid)})
    assert not fold[test].any()
    table = pa.table({"row": np.arange(len(fold)), "item": videos["item"], "fold": fold, "group": groups})
    context.save("splits", table)
    return {"folds": folds, "num_test": len(test), "seed": context.seed, "grouped": params.splits.grouped}


def generate_augmentations(context: Context, params: VideoParams) -> dict[str, Any]:
    """Draw the changes of each video's versions from its content and the seed alone: alike in all folds and resumes."""
    rows = []
    for item in context["load_data"].table("videos")["item"].to_pylist():
        for version in range(params.num_versions):
            digest = hashlib.sha256(f"{item} {version} {context.seed}".encode()).digest()
            rng = np.random.default_rng(list(digest[:16]))
            flip, gain, shift, dy, dx = rng.random(5)
            rows.append(
                {
                    "item": item,
                    "version": version,
                    "flip": bool(version and flip < 0.5),
                    "gain": float(0.8 + 0.4 * gain) if version else 1.0,
                    "shift": float(20 * shift - 10) if version else 0.0,
                    "dy": int(9 * dy) - 4 if version else 0,
                    "dx": int(9 * dx) - 4 if version else 0,
                }
            )
    context.save("augmentations", pa.Table.from_pylist(rows))
    return {"num_versions": params.num_versions, "num_rows": len(rows)}


def create_datasets(context: Context, params: VideoParams) -> dict[str, Any]:
    """Say what an item is; decode all videos once into one file, which the folds map."""
    phase("build")
    videos, clip = context["load_data"].table("videos"), params.clip
    shape = (len(videos), clip.num_frames, 3, clip.size, clip.size)
    path = context.dir / "frames.npy"
    frames = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    for row, name in enumerate(videos["path"].to_pylist()):  # an absolute path stays as it is
        frames[row] = sample_frames(context["load_data"].dir / name, clip.num_frames, clip.size)
    frames.flush()
    context.save("frames", path)
    return {
        "num_items": shape[0],
        "item_shape": list(shape[1:]),
        "dtype": "uint8",
        "all_bytes": frames.nbytes,
        "decoder": decoder_version(),
    }


def create_loaders(context: Context, params: VideoParams) -> dict[str, Any]:
    """Say what the batches of a fold are: their size, their memory, and who makes them."""
    recipe, asked = context["create_datasets"].result, params.loader
    num_workers = min(asked.num_workers, len(os.sched_getaffinity(0)))
    batch = asked.batch_size * int(np.prod(recipe["item_shape"]))
    return {
        "batch_size": asked.batch_size,
        "num_workers_requested": asked.num_workers,
        "num_workers": num_workers,
        "batch_bytes": batch,
        "ahead_bytes": 2 * num_workers * batch,  # a DataLoader's prefetch_factor is 2
        "seed": context.seed,
    }


class Clips:
    """The videos of some rows of ``frames``, for a ``DataLoader``.

    ``changes`` are those of each version, by row; a row without any has one.
    """

    def __init__(
        self,
        rows: Sequence[int],
        classes: npt.NDArray[np.int64],
        changes: Changes,
        frames: npt.NDArray[np.uint8],
    ) -> None:
        self.items = [(row, change) for row in rows for change in changes.get(row, [{}])]
        self._classes, self._frames = classes, frames

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[npt.NDArray[np.uint8], np.float32]:
        """Return frames of shape (time, 3, height, width) with memory of their own, and the class."""
        row, change = self.items[number]
        return changed(np.array(self._frames[row]), change), np.float32(self._classes[row])


def changed(frames: npt.NDArray[np.uint8], change: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Return frames moved, mirrored and lit otherwise; the picture is continued by its edge."""
    if not change or not change.get("version"):
        return frames
    dy, dx = change["dy"], change["dx"]
    size = frames.shape[-1]
    padded = np.pad(frames, ((0, 0), (0, 0), (4, 4), (4, 4)), mode="edge")
    moved = padded[:, :, 4 + dy : 4 + dy + size, 4 + dx : 4 + dx + size]
    moved = moved[..., ::-1] if change["flip"] else moved
    lit = moved.astype(np.float32) * np.float32(change["gain"]) + np.float32(change["shift"])
    result: npt.NDArray[np.uint8] = np.clip(lit, 0, 255).astype(np.uint8)
    return result


def changes_by_row(augmentations: pa.Table, videos: pa.Table, rows: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the versions of these rows' videos, and of no others."""
    of_item: dict[str, list[dict[str, Any]]] = {}
    for one in augmentations.to_pylist():
        of_item.setdefault(one["item"], []).append(one)
    items = videos["item"].to_pylist()
    return {row: of_item[items[row]] for row in rows}
