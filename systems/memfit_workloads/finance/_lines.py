"""What scores came to, as lines of text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from memfit_workloads.finance._decision import Decision

Detail = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
_PERCENT = ("total_return", "annual_return", "annual_benchmark", "volatility")


def judged_lines(found: Mapping[str, Any], detail: Detail = "WARNING") -> Iterator[str]:
    """The verdict with its reasons, the backtest in numbers, and the metrics, of what `Judged.to_dict` gave.

    ``ERROR`` gives the verdict alone; ``WARNING`` what is not green and the numbers; ``INFO`` also all horizons;
    ``DEBUG`` also what is green.
    """
    verdict = found["verdict"]
    yield f"gate: {verdict['colour']}"
    if detail == "ERROR":
        return
    for reason in verdict["reasons"]:
        if reason["colour"] != "green" or detail == "DEBUG":
            yield f"  {reason['colour']:<6}  {reason['name']}: {reason['text']}"
    for knob in verdict["knobs"]:
        value = f" (now {knob['value']} {knob['unit']})" if knob["value"] else f" ({knob['unit']})"
        yield f"  change  {knob['name']}{value}: {knob['direction']}"
    for finding in found["findings"]:
        yield f"  data    {finding['name']}: {finding['evidence']} {finding['remedy']}"
    yield from _number_lines(found["summary"])
    prefix = "" if detail in ("INFO", "DEBUG") else f"h{found['settings']['horizon']}_"
    metrics = {name: one for name, one in found["metrics"].items() if name.startswith(prefix)}
    yield f"{'metric':<24}{'mean':>9}{'± error':>9}{'n':>7}"
    for name, one in metrics.items():
        error = _number(one["standard_error"], signed=False)
        yield f"{name:<24}{_number(one['mean']):>9}{error:>9}{one['num_dates']:>7}"
    if len(found["tried"]) > 1:
        yield from _tried_lines(found["tried"])
    if (volatility := found["volatility"])["warns"]:
        yield (
            f"warning: the traded scores rank assets by volatility: mean rank correlation {volatility['mean']:+.2f} "
            f"with the volatility of the last {volatility['past_dates']} dates, n {volatility['num_dates']} dates."
        )
        yield "  Rank IC and precision at k may then show volatility instead of skill; the spread does so least."


def _number_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    shown = "  ".join(f"{name} {summary[name]:+.2%}" for name in _PERCENT if summary[name] is not None)
    yield f"{summary['start']} to {summary['end']}, {summary['num_dates']} dates: {shown}"
    if summary["sharpe"] is not None:
        yield (
            f"sharpe {summary['sharpe']:.2f} ± {summary['sharpe_error']:.2f}  held {summary['mean_held']:.1f} assets  "
            f"fallback {summary['share_fallback'] or 0:.1%}  empty {summary['share_empty'] or 0:.1%} of the days"
        )


def _tried_lines(tried: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"{'k_ratio':>7}{'held':>7}{'annual return':>15}{'before costs':>14}{'sharpe':>9}"
    for ratio, summary in tried.items():
        figures = (summary["annual_return"], summary["annual_return_gross"])
        net, gross = ["-" if value is None else f"{value:+.2%}" for value in figures]
        yield f"{ratio:>7}{summary['mean_held']:>7.1f}{net:>15}{gross:>14}{_number(summary['sharpe']):>9}"


def decision_lines(decision: Decision, baseline: str) -> Iterator[str]:
    """A decision with its evidence."""
    yield f"decision: {decision.verdict} ({decision.metric}, A is this, B is {baseline})"
    for title, text in decision.explain().items():
        yield f"  {title:<15}{text}"


def _number(value: float | None, *, signed: bool = True) -> str:
    return "-" if value is None else f"{value:{'+' if signed else ''}.4f}"
