"""What predictions are worth: metrics, intervals over whole groups, and two rules that see no frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.pipeline import Context
from memfit.rundir import phase
from memfit_workloads.video.params import VideoParams

_NUM_RESAMPLES, _LEVEL = 1000, 0.95
#: What a file says without being decoded.
_OF_FILE = ("num_bytes", "num_frames", "seconds", "fps", "width", "height")
METRICS = ("auc", "accuracy", "loss")


def logits_in(table: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the classes of a table of predictions, and its log-odds (n, num_outputs)."""
    return table["class"].to_numpy(), np.array(table["logit"].to_pylist(), np.float64).reshape(len(table), -1)


def metrics(classes: npt.NDArray[Any], logits: npt.NDArray[Any]) -> dict[str, float]:
    """Return ``auc``, ``accuracy`` of the likeliest class, and ``loss``, the mean cross-entropy in nats.

    ``logits`` (n, num_outputs) are the log-odds of the second of two classes, or those of each of more.
    ``auc`` is that of the second of two classes, or the mean over more, each against the rest; 0.5 of one alone.
    """
    from scipy.stats import rankdata

    logits = logits if logits.shape[1] > 1 else np.concatenate([np.zeros_like(logits), logits], axis=1)
    areas: list[float] = []
    for own in range(1 if logits.shape[1] == 2 else 0, logits.shape[1]):
        num_own = int(np.sum(classes == own))
        odds = logits[:, own] - np.logaddexp.reduce(np.delete(logits, own, axis=1), axis=1)
        above = rankdata(odds)[classes == own].sum() - num_own * (num_own + 1) / 2  # the Mann-Whitney statistic
        areas += [float(above / pairs)] if (pairs := num_own * (len(classes) - num_own)) else []
    lead = logits - logits[np.arange(len(classes)), classes][:, None]
    return {
        "auc": float(np.mean(areas)) if areas else 0.5,
        "accuracy": float(np.mean(logits.argmax(axis=1) == classes)),
        "loss": float(np.mean(np.logaddexp.reduce(lead, axis=1))),
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
    counts = np.bincount(classes[train])
    majority = len(counts) - 1 - int(counts[::-1].argmax())  # of several the last
    rule = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(features[train], classes[train])
    return {
        "majority": float(np.mean(classes[valid] == majority)),
        "file_statistics": float(rule.score(features[valid], classes[valid])),
    }


def evaluate(context: Context, params: VideoParams) -> dict[str, Any]:
    """Judge all folds together: each video by the one fold that did not train on it, the test set by all folds.

    The result holds each metric's ``mean``, ``sd`` and ``best`` over the folds and its ``pooled`` value with an
    interval; the same on the test set; the gap and the two rules' accuracies.
    """
    phase("validate")
    units = context.units("fold")
    valid = pa.concat_tables([unit.table("valid_predictions") for unit in units])
    groups = context["load_data"].table("videos")["group"].to_numpy()
    rng = np.random.default_rng(context.seed)
    truth, logits = logits_in(valid)
    pooled = _judged(truth, logits, groups[valid["row"].to_numpy()], rng)
    tests = [unit.table("test_predictions") for unit in units]
    rows, test = tests[0]["row"].to_numpy(), dict[str, dict[str, float]]()
    if len(rows):
        means = np.mean([logits_in(one)[1] for one in tests], axis=0)
        test = _judged(tests[0]["class"].to_numpy(), means, groups[rows], rng)
    found: dict[str, Any] = {}
    for name in (*METRICS, "gap", "majority", "file_statistics"):
        values = np.array([unit.result[name] for unit in units])
        best = values.min() if name in ("loss", "gap") else values.max()
        sd = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        found[name] = {"mean": float(values.mean()), "sd": sd, "best": float(best), "n": len(values)}
    context.save("out_of_fold", valid.sort_by("row"))
    context.save("scores", {"folds": found, "pooled": pooled, "test": test})
    return {
        "pooled_auc": pooled["auc"]["value"],
        "pooled_accuracy": pooled["accuracy"]["value"],
        "test_auc": test["auc"]["value"] if test else None,
        "report": _lines(found, pooled, test),
    }


def _judged(
    classes: npt.NDArray[Any], logits: npt.NDArray[Any], groups: npt.NDArray[Any], rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Return each metric with its interval: a percentile bootstrap over whole groups, for videos of one are alike."""
    rows = [np.flatnonzero(groups == one) for one in np.unique(groups)]
    drawn = []
    for _ in range(_NUM_RESAMPLES):
        picked = np.concatenate([rows[at] for at in rng.integers(len(rows), size=len(rows))])
        if len(np.unique(classes[picked])) == max(2, logits.shape[1]):
            drawn.append(metrics(classes[picked], logits[picked]))
    tail = 100 * (1 - _LEVEL) / 2
    found = {}
    for name, value in metrics(classes, logits).items():
        low, high = np.percentile([one[name] for one in drawn] or [value], [tail, 100 - tail])
        found[name] = {"value": value, "low": float(low), "high": float(high)}
    return found


def _lines(folds: dict[str, Any], pooled: dict[str, Any], test: dict[str, Any]) -> list[str]:
    def interval(one: dict[str, float]) -> str:
        return f"{one['value']:.3f} ({_LEVEL:.0%} interval {one['low']:.3f} to {one['high']:.3f})"

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
    return lines
