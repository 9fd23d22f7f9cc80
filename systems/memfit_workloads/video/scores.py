"""What predictions are worth: metrics, intervals over whole groups, and two rules that see no frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.pipeline import Context
from memfit.rundir import phase
from memfit_workloads.video.params import VideoParams

_NUM_RESAMPLES = 1000
#: What a file says without being decoded.
_OF_FILE = ("num_bytes", "num_frames", "seconds", "fps", "width", "height")
METRICS = ("auc", "accuracy", "loss")


def binary_metrics(classes: npt.NDArray[Any], logits: npt.NDArray[Any]) -> dict[str, float]:
    """Return ``auc``, ``accuracy`` (of log-odds above 0) and ``loss`` (mean cross-entropy in nats).

    ``auc`` is 0.5 where there is one class alone.
    """
    from scipy.stats import rankdata

    num_ones = int(np.sum(classes == 1))
    pairs = num_ones * (len(classes) - num_ones)
    above = rankdata(logits)[classes == 1].sum() - num_ones * (num_ones + 1) / 2  # the Mann-Whitney statistic
    signed = np.where(classes == 1, logits, -logits)
    return {
        "auc": float(above / pairs) if pairs else 0.5,
        "accuracy": float(np.mean((logits > 0) == (classes == 1))),
        "loss": float(np.mean(np.logaddexp(0, -signed))),
    }


def baselines(
    videos: pa.Table, classes: npt.NDArray[np.int64], train: npt.NDArray[np.int64], valid: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Return the validation accuracy of the most frequent class, and of a linear rule on sizes, rates and codec.

    What the second gains over the first is what files give away without their frames.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    codecs = np.asarray(videos["codec"].to_pylist())
    columns = [np.log1p(videos[name].to_numpy().astype(float)) for name in _OF_FILE]
    columns += [(codecs == one).astype(float) for one in np.unique(codecs)]
    features = np.stack(columns, axis=1)
    majority = int(np.mean(classes[train]) >= 0.5)
    rule = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(features[train], classes[train])
    return {
        "majority": float(np.mean(classes[valid] == majority)),
        "file_statistics": float(rule.score(features[valid], classes[valid])),
    }


def evaluate(context: Context, params: VideoParams) -> dict[str, Any]:
    """Judge all folds together: each video by the one fold that did not train on it, the test set by all folds.

    The result holds each metric's ``mean``, ``sd`` and ``best`` over the folds and its ``pooled`` value with an
    interval; the same on the test set; the confusion matrix; the gap and the two rules' accuracies.
    """
    phase("validate")
    units = context.units("fold")
    valid = pa.concat_tables([unit.table("valid_predictions") for unit in units])
    groups = context["load_data"].table("videos")["group"].to_numpy()
    rng = np.random.default_rng(context.seed)
    truth, logits = valid["class"].to_numpy(), valid["logit"].to_numpy()
    pooled = _judged(truth, logits, groups[valid["row"].to_numpy()], params.level, rng)
    tests = [unit.table("test_predictions") for unit in units]
    means, rows = np.mean([one["logit"].to_numpy() for one in tests], axis=0), tests[0]["row"].to_numpy()
    test = _judged(tests[0]["class"].to_numpy(), means, groups[rows], params.level, rng) if len(rows) else {}
    found: dict[str, Any] = {}
    for name in (*METRICS, "gap", "majority", "file_statistics"):
        values = np.array([unit.result[name] for unit in units])
        best = values.min() if name in ("loss", "gap") else values.max()
        sd = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        found[name] = {"mean": float(values.mean()), "sd": sd, "best": float(best), "n": len(values)}
    confusion = [[int(np.sum((truth == row) & ((logits > 0) == bool(column)))) for column in (0, 1)] for row in (0, 1)]
    context.save("out_of_fold", valid.sort_by("row"))
    context.save("scores", {"folds": found, "pooled": pooled, "test": test, "confusion": confusion})
    return {
        "pooled_auc": pooled["auc"]["value"],
        "pooled_accuracy": pooled["accuracy"]["value"],
        "test_auc": test["auc"]["value"] if test else None,
        "report": list(_lines(found, pooled, test, confusion, context["load_data"].result["classes"], params.level)),
    }


def _judged(
    classes: npt.NDArray[Any],
    logits: npt.NDArray[Any],
    groups: npt.NDArray[Any],
    level: float,
    rng: np.random.Generator,
) -> dict[str, dict[str, float]]:
    """Return each metric with its interval: a percentile bootstrap over whole groups, for videos of one are alike."""
    rows = [np.flatnonzero(groups == one) for one in np.unique(groups)]
    drawn = []
    for _ in range(_NUM_RESAMPLES):
        picked = np.concatenate([rows[at] for at in rng.integers(len(rows), size=len(rows))])
        if len(np.unique(classes[picked])) == 2:
            drawn.append(binary_metrics(classes[picked], logits[picked]))
    tail = 100 * (1 - level) / 2
    found = {}
    for name, value in binary_metrics(classes, logits).items():
        low, high = np.percentile([one[name] for one in drawn] or [value], [tail, 100 - tail])
        found[name] = {"value": value, "low": float(low), "high": float(high)}
    return found


def _lines(
    folds: dict[str, Any], pooled: dict[str, Any], test: dict[str, Any], confusion: list[list[int]],
    classes: list[str], level: float,
) -> list[str]:  # fmt: skip
    def interval(one: dict[str, float]) -> str:
        return f"{one['value']:.3f} ({level:.0%} interval {one['low']:.3f} to {one['high']:.3f})"

    rules = (
        f"most frequent class {folds['majority']['mean']:.3f}, file statistics {folds['file_statistics']['mean']:.3f}"
    )
    lines = [
        f"out of fold: accuracy {interval(pooled['accuracy'])}, AUC {interval(pooled['auc'])}",
        f"without a look at a frame: {rules}",
        f"train less validation accuracy: {folds['gap']['mean']:.3f}, sd {folds['gap']['sd']:.3f}",
    ]
    if test:
        lines.append(f"test set, mean of the folds: accuracy {interval(test['accuracy'])}, AUC {interval(test['auc'])}")
    (a, b), (c, d) = confusion
    lines.append(f"{classes[0]}: {a} right, {b} wrong; {classes[1]}: {d} right, {c} wrong")
    return lines
