"""Find videos that look alike, by small grey pictures of their frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Grey levels of 255 by which near-duplicates differ, at most. Of 160 sample clips, 87 % of the pairs of one segment
#: (another codec, a part spliced, frozen or covered) are within it, and are grouped; so are 4 % of the other pairs,
#: most of which are neighbours in a still scene.
MOST_DIFFERENCE = 1.5
_SIDE = 8
_PAIRS = 1 << 15


def frame_signatures(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return a perceptual hash of frames (time, 3, height, width), shape (time, 64): the mean grey of 8 x 8 cells."""
    grey = frames.mean(axis=1)
    rows, columns = (np.linspace(0, size, _SIDE + 1).astype(int) for size in grey.shape[1:])
    sums = np.add.reduceat(np.add.reduceat(grey, rows[:-1], axis=1), columns[:-1], axis=2)
    means = sums / np.diff(rows)[:, None] / np.diff(columns)
    return means.round().astype(np.uint8).reshape(len(frames), _SIDE * _SIDE)


def group_alike(signatures: npt.NDArray[np.uint8], own_groups: Sequence[str] | None = None) -> npt.NDArray[np.int64]:
    """Return a group number for each video: alike, or alike to one that is alike, or of one group of the user's.

    ``signatures`` (n, time, 64) are of frames at the same places of each video; an empty name of ``own_groups`` joins
    nothing. Two frames differ by the median over their cells, so that a covered part does not count; two videos by the
    mean over the more similar half of their frames, so that a spliced part does not.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    num, half = len(signatures), max(1, signatures.shape[1] // 2)
    values = signatures.astype(np.int16)
    pairs: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    step = max(1, _PAIRS // num)
    for start in range(0, num, step):
        frames = np.median(np.abs(values[start : start + step, None] - values[None]), axis=-1)
        different = np.sort(frames, axis=-1)[..., :half].mean(axis=-1)
        a, b = np.nonzero(different <= MOST_DIFFERENCE)
        pairs.append((a + start, b))
    names = np.asarray(own_groups if own_groups is not None else [""] * num)
    for name in {*names.tolist()} - {""}:
        own = np.flatnonzero(names == name)
        pairs.append((np.full(len(own), own[0]), own))
    rows, columns = (np.concatenate(side) for side in zip(*pairs, strict=True))
    graph = coo_matrix((np.ones(len(rows), bool), (rows, columns)), shape=(num, num))
    _, labels = connected_components(graph, directed=False)
    _, first = np.unique(labels, return_index=True)
    numbers: npt.NDArray[np.int64] = np.argsort(np.argsort(first))[labels]  # in the order of their first videos
    return numbers
