"""How good a ranking of assets was on each date, whether one is better than another, and how sure that is.

Scores become matrices (`read_scores`), matrices a table of one row per date (`evaluate_days`, `evaluate_folds`), and
two such tables a decision (`decide`, `decide_on_record`). The metrics and the tests work on plain arrays as well.

Example:
    >>> import numpy as np
    >>> from memfit.evaluation import rank_ic, summarize
    >>> scores = np.array([[0.1, 0.4, 0.3], [0.2, 0.1, 0.9], [0.7, np.nan, 0.1]])  # 3 dates, 3 assets
    >>> returns = np.array([[0.00, 0.02, 0.01], [0.03, 0.01, 0.02], [0.01, 0.02, 0.03]])
    >>> rank_ic(scores, returns)
    array([ 1. ,  0.5, -1. ])
    >>> summary = summarize(rank_ic(scores, returns), horizon=1)
    >>> f"rank IC {summary.mean:.3f} ± {summary.standard_error:.3f}, n {summary.num_dates}, ICIR {summary.icir:.2f}"
    'rank IC 0.167 ± 0.601, n 3, ICIR 0.16'
"""

from memfit.evaluation._days import evaluate_days, evaluate_folds, read_days, summarize_days
from memfit.evaluation._decision import Decision, FoldEffect, decide, decide_on_record, read_record, record_of
from memfit.evaluation._inference import (
    DieboldMariano,
    Interval,
    SlowVariation,
    Summary,
    adjust_p_value,
    bootstrap_interval,
    diebold_mariano,
    minimal_detectable_effect,
    minimum_dates,
    power,
    slow_variation,
    summarize,
)
from memfit.evaluation._intervals import wilson_interval
from memfit.evaluation._metrics import (
    hit_rate,
    ndcg_at_k,
    positive_rate,
    precision_at_k,
    quantile_spread,
    rank_ic,
    rank_ic_by_date,
)
from memfit.evaluation._scores import Scores, read_scores
from memfit.evaluation._seeds import SeedComparison, compare_seeds

__all__ = [
    "Decision",
    "DieboldMariano",
    "FoldEffect",
    "Interval",
    "Scores",
    "SeedComparison",
    "SlowVariation",
    "Summary",
    "adjust_p_value",
    "bootstrap_interval",
    "compare_seeds",
    "decide",
    "decide_on_record",
    "diebold_mariano",
    "evaluate_days",
    "evaluate_folds",
    "hit_rate",
    "minimal_detectable_effect",
    "minimum_dates",
    "ndcg_at_k",
    "positive_rate",
    "power",
    "precision_at_k",
    "quantile_spread",
    "rank_ic",
    "rank_ic_by_date",
    "read_days",
    "read_record",
    "read_scores",
    "record_of",
    "slow_variation",
    "summarize",
    "summarize_days",
    "wilson_interval",
]
