"""Judge the scores of trained folds: metrics by day, comparisons, backtests with controls, a gate and a decision.

`stages` are the stages that a workload of folds adds to its own: blend, health, backtest, decision. Its params derive
from `JudgeSettings`; its ``prepare`` returns what `save_folds` gives, and its checkpoints say what `provenance` gives.

The parts serve scores of any origin as well. Scores become matrices (`read_scores`), matrices a table of one row per
date (`evaluate_days`, `evaluate_folds`), and two such tables a decision (`decide`, `decide_on_record`). Beside them are
a backtest (`BacktestInput.run`), what luck would have given (`run_controls`), checks of prices, volumes and features
(`check_market`), and the gate (`judge`).
"""

from memfit_workloads.finance._backtest import BacktestInput as BacktestInput
from memfit_workloads.finance._backtest import BacktestResult as BacktestResult
from memfit_workloads.finance._backtest import BacktestSettings as BacktestSettings
from memfit_workloads.finance._blend import join_scores as join_scores
from memfit_workloads.finance._checks import Finding as Finding
from memfit_workloads.finance._checks import QualitySettings as QualitySettings
from memfit_workloads.finance._checks import check_market as check_market
from memfit_workloads.finance._controls import Controls as Controls
from memfit_workloads.finance._controls import run_controls as run_controls
from memfit_workloads.finance._controls import shuffle_scores as shuffle_scores
from memfit_workloads.finance._controls import sweep as sweep
from memfit_workloads.finance._days import evaluate_days as evaluate_days
from memfit_workloads.finance._days import evaluate_folds as evaluate_folds
from memfit_workloads.finance._days import read_days as read_days
from memfit_workloads.finance._days import summarize_days as summarize_days
from memfit_workloads.finance._decision import decide as decide
from memfit_workloads.finance._decision import decide_on_record as decide_on_record
from memfit_workloads.finance._decision import record_of as record_of
from memfit_workloads.finance._gate import GateSettings as GateSettings
from memfit_workloads.finance._gate import Verdict as Verdict
from memfit_workloads.finance._gate import judge as judge
from memfit_workloads.finance._inference import diebold_mariano as diebold_mariano
from memfit_workloads.finance._inference import minimum_dates as minimum_dates
from memfit_workloads.finance._inference import sharpe as sharpe
from memfit_workloads.finance._inference import standard_error as standard_error
from memfit_workloads.finance._inference import summarize as summarize
from memfit_workloads.finance._judge import decide_on as decide_on
from memfit_workloads.finance._judge import judge_scores as judge_scores
from memfit_workloads.finance._judge import volatility_correlation as volatility_correlation
from memfit_workloads.finance._matrices import Market as Market
from memfit_workloads.finance._matrices import Scores as Scores
from memfit_workloads.finance._matrices import forward_returns as forward_returns
from memfit_workloads.finance._matrices import read_market as read_market
from memfit_workloads.finance._matrices import read_scores as read_scores
from memfit_workloads.finance._metrics import positive_rate as positive_rate
from memfit_workloads.finance._metrics import precision_at_k as precision_at_k
from memfit_workloads.finance._metrics import quantile_spread as quantile_spread
from memfit_workloads.finance._metrics import rank_ic as rank_ic
from memfit_workloads.finance._provenance import Provenance as Provenance
from memfit_workloads.finance._provenance import fold_of as fold_of
from memfit_workloads.finance._provenance import provenance as provenance
from memfit_workloads.finance._provenance import read_provenance as read_provenance
from memfit_workloads.finance._provenance import save_folds as save_folds
from memfit_workloads.finance._report import read_backtest as read_backtest
from memfit_workloads.finance._report import write_backtest as write_backtest
from memfit_workloads.finance._settings import JudgeSettings as JudgeSettings
from memfit_workloads.finance._stages import GATE_EXIT_CODES as GATE_EXIT_CODES
from memfit_workloads.finance._stages import fingerprint as fingerprint
from memfit_workloads.finance._stages import stages as stages
from memfit_workloads.finance._targets import judge_targets as judge_targets
