"""How good a ranking of assets was: the rank IC of each date, and its summary over dates.

Example:
    >>> import numpy as np
    >>> from memfit.evaluation import rank_ic, summarize_ic
    >>> scores = np.array([[0.1, 0.4, 0.3], [0.2, 0.1, 0.9], [0.7, np.nan, 0.1]])  # 3 dates, 3 assets
    >>> returns = np.array([[0.00, 0.02, 0.01], [0.03, 0.01, 0.02], [0.01, 0.02, 0.03]])
    >>> rank_ic(scores, returns)
    array([ 1. ,  0.5, -1. ])
    >>> summary = summarize_ic(rank_ic(scores, returns))
    >>> f"rank IC {summary.mean:.3f}, sd {summary.sd:.3f}, n {summary.num_dates}, ICIR {summary.icir:.2f}"
    'rank IC 0.167, sd 1.041, n 3, ICIR 0.16'
"""

from memfit.evaluation._rank_ic import ICSummary, rank_ic, rank_ic_by_date, summarize_ic

__all__ = ["ICSummary", "rank_ic", "rank_ic_by_date", "summarize_ic"]
