"""What a workflow or a backtest came to, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from memfit.rundir import RunDir, read_json

Detail = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
_STYLES = {"green": "green", "yellow": "yellow", "red": "bold red"}
_PERCENT = ("total_return", "annual_return", "annual_benchmark", "max_drawdown", "volatility", "mean_turnover")
_PHASES = ("health", "results")


def summarize_workflow(run: RunDir) -> dict[str, Any]:
    """What the phases of a workflow came to, by name; one that was not passed is None.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> summarize_workflow(RunDir.create(Path(tempfile.mkdtemp()), "demo", "0" * 64))
        {'health': None, 'results': None, 'sweep': []}
    """
    found: dict[str, Any] = {name: _result(run, name) for name in _PHASES}
    found["sweep"] = [
        {"job": path.parent.name, "params": job["params"], "metrics": result["result"]}
        for path in sorted(run.path.glob("jobs/sweep_*/result.json"))
        if (result := read_json(path, {"result": {str: (int, float)}}))
        and (job := read_json(path.with_name("job.json"), {"params": dict}))
    ]
    return found


def _result(run: RunDir, name: str) -> dict[str, Any] | None:
    content = read_json(run.job_dir(name) / "result.json", {"result": dict})
    return None if content is None else dict(content["result"])


def print_workflow(run: RunDir, log: Console) -> None:
    """Print what the phases of a workflow came to, and where their files lie."""
    found = summarize_workflow(run)
    for name in _PHASES:
        phase = found[name]
        if phase is None:
            continue
        folder = "results/health" if name == "health" else "results"
        log.print(f"\n{name}: {_what(name, phase)}", style="bold", markup=False)
        print_backtest(phase, log)
        log.print(f"files: {run.path / folder}", markup=False, soft_wrap=True)
    if found["sweep"]:
        log.print("\nother settings on the first fold (for a look, not to choose the best by)", markup=False)
        for one in found["sweep"]:
            metrics = "  ".join(f"{name} {value:.4g}" for name, value in one["metrics"].items())
            chosen = "  ".join(f"{name}={value}" for name, value in one["params"].items())
            log.print(f"  {one['job']}  {chosen}  {metrics}", markup=False, soft_wrap=True)


def _what(name: str, phase: Mapping[str, Any]) -> str:
    folds = phase["folds"]
    if name == "health":
        told = f"fold {folds[0]['fold']}, the mean of {', '.join(folds[0]['sources'])}"
        alone = folds[0].get("newest_rank_ic")
        if alone is None or folds[0]["rank_ic"] is None:
            return told
        return f"{told}: rank IC {folds[0]['rank_ic']:+.4f}, of the newest checkpoint alone {alone:+.4f}"
    return f"{len(folds)} folds, each date scored by the model that did not see it"


def print_backtest(found: Mapping[str, Any], log: Console, detail: Detail = "WARNING") -> None:
    """Print a verdict with its reasons, the backtest in numbers, the metrics, and the decision where there is one.

    Args:
        found: What a phase or ``backtest_checkpoints`` gave.
        log: Where to.
        detail: ``ERROR`` prints the verdict alone; ``WARNING`` what is not green and the numbers; ``INFO`` also how
            many dates each checkpoint scored, and all horizons; ``DEBUG`` also what is green.
    """
    verdict, summary = found["verdict"], found["summary"]
    log.print(f"gate: {verdict['colour']}", style=_STYLES[verdict["colour"]], markup=False)
    if detail == "ERROR":
        return
    for reason in verdict["reasons"]:
        if reason["colour"] != "green" or detail == "DEBUG":
            log.print(f"  {reason['colour']:<6}  {reason['name']}: {reason['text']}", markup=False, soft_wrap=True)
    for knob in verdict["knobs"]:
        value = f" (now {knob['value']} {knob['unit']})" if knob["value"] else f" ({knob['unit']})"
        log.print(f"  turn    {knob['name']}{value}: {knob['direction']}", markup=False, soft_wrap=True)
    for finding in found["findings"]:
        text = f"{finding['name']}: {finding['evidence']} {finding['remedy']}"
        log.print(f"  data    {text}", markup=False, soft_wrap=True)
    if detail in ("INFO", "DEBUG"):
        for one in found["folds"]:
            log.print(f"  fold {one['fold']}: {one['checkpoint']} scored {one['num_dates']} dates", markup=False)
    _print_numbers(summary, log)
    prefix = "" if detail in ("INFO", "DEBUG") else f"h{found['settings']['horizon']}_"
    log.print(_metrics_table({name: one for name, one in found["metrics"].items() if name.startswith(prefix)}))
    if (deflated := found["deflated_sharpe"]) is not None:
        log.print(f"probability that the true Sharpe ratio is above 0, after the shares tried below: {deflated:.2f}")
    if len(found["tried"]) > 1:
        log.print(_tried_table(found["tried"]))
    _print_decision(found, log)
    if (volatility := found.get("volatility")) and volatility["warns"]:
        _print_volatility(volatility, log)


def _print_numbers(summary: Mapping[str, Any], log: Console) -> None:
    shown = {name: summary[name] for name in _PERCENT if summary[name] is not None}
    text = "  ".join(f"{name} {value:+.2%}" for name, value in shown.items())
    when = f"{summary['start']} to {summary['end']}, {summary['num_dates']} dates"
    log.print(f"{when}: {text}", markup=False, soft_wrap=True)
    if summary["sharpe"] is not None:
        log.print(
            f"sharpe {summary['sharpe']:.2f} ± {summary['sharpe_error']:.2f}  held {summary['mean_held']:.1f} assets  "
            f"fallback {summary['share_fallback'] or 0:.1%}  empty {summary['share_empty'] or 0:.1%} of the days",
            markup=False,
            soft_wrap=True,
        )


def _metrics_table(metrics: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("metric", "mean", "± error", "n"):
        table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True)
    for name, one in metrics.items():
        table.add_row(name, _number(one["mean"]), _number(one["standard_error"], signed=False), str(one["num_dates"]))
    return table


def _tried_table(tried: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("k_ratio", "held", "annual return", "before costs", "sharpe"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in tried:
        summary = row["summary"]
        figures = (summary["annual_return"], summary["annual_return_gross"])
        percents = ["-" if value is None else f"{value:+.2%}" for value in figures]
        table.add_row(f"{row['k_ratio']:g}", f"{row['mean_held']:.1f}", *percents, _number(summary["sharpe"]))
    return table


def _print_decision(found: Mapping[str, Any], log: Console) -> None:
    if why := found.get("no_decision"):
        log.print(f"decision: none. {why}", style="bold", markup=False, soft_wrap=True)
    if not (decision := found.get("decision")):
        return
    counted = f"Holm for {decision['num_comparisons']} comparison{'s' if decision['num_comparisons'] > 1 else ''}"
    log.print(
        f"decision: {decision['verdict']} ({decision['metric']}, A is this, B is {decision['b']})",
        style="bold",
        markup=False,
    )
    log.print(
        f"  effect {_number(decision['effect'])}, {decision['level']:.0%} interval {_number(decision['lower'])} to "
        f"{_number(decision['upper'])}; n {decision['num_dates']} dates in {decision['num_folds']} folds; "
        f"p {_number(decision['p_value'], signed=False)}, {_number(decision['adjusted_p_value'], signed=False)} after "
        f"{counted}; these dates could have shown {_number(decision['minimal_detectable_effect'], signed=False)}",
        markup=False,
        soft_wrap=True,
    )
    if second := decision.get("beside"):
        log.print(
            f"  beside it {second['metric']}: effect {_number(second['effect'])}, {decision['level']:.0%} interval "
            f"{_number(second['lower'])} to {_number(second['upper'])}; n {second['num_dates']} dates; p "
            f"{_number(second['p_value'], signed=False)}; no second decision, and not counted",
            markup=False,
            soft_wrap=True,
        )
    if decision.get("is_slow"):
        log.print(f"  warning: {slow_note(decision)}", style="yellow", markup=False, soft_wrap=True)


def slow_note(decision: Mapping[str, Any]) -> str:
    """Say that a decision's difference varies slowly, and what follows.

    Example:
        >>> found = {"metric": "h5_rank_ic", "horizon": 5, "level": 0.95, "slow_error_factor": 1.4}
        >>> slow_note(found | {"slow_statistic": 2.61, "statistic": -2.1})
        'h5_rank_ic varies slowly, ... (z +2.6). Its true error is about 1.4 times as large, and t then -1.5...'
    """
    return (
        f"{decision['metric']} varies slowly, beyond the {decision['horizon']} dates that labels span "
        f"(z {decision['slow_statistic']:+.1f}). Its true error is about {decision['slow_error_factor']:.1f} times as "
        f"large, and t then {decision['statistic'] / decision['slow_error_factor']:+.1f}. "
        f"False decisions are more frequent than {1 - decision['level']:.0%}."
    )


def _print_volatility(volatility: Mapping[str, Any], log: Console) -> None:
    log.print(
        "warning: the traded scores rank assets by volatility: mean rank correlation "
        f"{volatility['mean']:+.2f} with the volatility of the last {volatility['past_dates']} dates, "
        f"n {volatility['num_dates']} dates.",
        style="yellow",
        markup=False,
        soft_wrap=True,
    )
    log.print(
        "  Rank IC and precision at k may then show volatility instead of skill; the spread does so least.",
        markup=False,
        soft_wrap=True,
    )


def _number(value: float | None, *, signed: bool = True) -> str:
    return "-" if value is None else f"{value:{'+' if signed else ''}.4f}"
