"""Splits of dated rows into train and test that let no label leak.

`PurgedKFold` trains on both sides of the test block, `WalkForward` on its past. Both are used like scikit-learn's
splitters.

Example:
    >>> import numpy as np
    >>> from memfit.splits import PurgedKFold, sizes_table
    >>> splitter = PurgedKFold(3, purged_size=2, embargo_size=1)  # a label of day i is known on day i + 2
    >>> for train, test in splitter.split(np.zeros(12)):
    ...     print(train, test)
    [ 7  8  9 10 11] [0 1 2 3]
    [ 0  1 11] [4 5 6 7]
    [0 1 2 3 4 5] [ 8  9 10 11]
    >>> print(sizes_table(splitter.describe(np.zeros(12))))
    fold  train rows  train dates  test rows  test dates  purged before  purged after  embargoed  look-back
       1           5            5          4           4              0             2          1          0
       2           3            3          4           4              2             2          1          0
       3           6            6          4           4              2             0          0          0
"""

from memfit.splits._purged import PurgedKFold, SplitSummary, WalkForward, sizes_table

__all__ = ["PurgedKFold", "SplitSummary", "WalkForward", "sizes_table"]
