"""Judge the scores of trained folds: backtests with controls, checks of the data, a gate and a decision.

`stages` are the stages that a workload of folds adds to its own: blend, health, backtest, decision. Its params derive
from `JudgeSettings`; its ``prepare`` returns what `save_folds` gives, and its checkpoints say what `provenance` gives.
The parts serve scores of any origin as well: a backtest (`BacktestInput.run`), what luck would have given
(`run_controls`), checks of prices, volumes and features (`check_market`), and the gate (`judge`).
"""

from memfit_workloads.finance._backtest import BacktestResult, BacktestSummary, QuantileRow, backtest
from memfit_workloads.finance._blend import join_scores
from memfit_workloads.finance._controls import (
    BacktestInput,
    Controls,
    ShiftTest,
    SweepRow,
    run_controls,
    shift_scores,
    shift_test,
    shuffle_scores,
    sweep,
)
from memfit_workloads.finance._gate import GateSettings, Knob, Reason, Verdict, judge
from memfit_workloads.finance._judge import Judged, judge_scores
from memfit_workloads.finance._market import Finding, Market, QualitySettings, read_market
from memfit_workloads.finance._provenance import Provenance, fold_of, provenance, read_provenance, save_folds
from memfit_workloads.finance._quality import check_market
from memfit_workloads.finance._report import BacktestReport, read_backtest, write_backtest
from memfit_workloads.finance._settings import DecisionSettings, JudgeSettings
from memfit_workloads.finance._sharpe import Sharpe, deflated_sharpe, probabilistic_sharpe, sharpe
from memfit_workloads.finance._sleeves import BacktestSettings
from memfit_workloads.finance._stages import GATE_EXIT_CODES, fingerprint, stages
from memfit_workloads.finance._volatility import VolatilityCorrelation, volatility_correlation

__all__ = [
    "BacktestInput",
    "BacktestReport",
    "BacktestResult",
    "BacktestSettings",
    "BacktestSummary",
    "Controls",
    "DecisionSettings",
    "Finding",
    "GATE_EXIT_CODES",
    "GateSettings",
    "JudgeSettings",
    "Judged",
    "Knob",
    "Market",
    "Provenance",
    "QualitySettings",
    "QuantileRow",
    "Reason",
    "Sharpe",
    "ShiftTest",
    "SweepRow",
    "Verdict",
    "VolatilityCorrelation",
    "backtest",
    "check_market",
    "deflated_sharpe",
    "fingerprint",
    "fold_of",
    "join_scores",
    "judge",
    "judge_scores",
    "probabilistic_sharpe",
    "provenance",
    "read_backtest",
    "read_market",
    "read_provenance",
    "run_controls",
    "save_folds",
    "sharpe",
    "shift_scores",
    "shift_test",
    "shuffle_scores",
    "stages",
    "sweep",
    "volatility_correlation",
    "write_backtest",
]
