"""The interval of a rate."""

from __future__ import annotations

import math
import statistics

_LEVEL = 0.95  # the share of intervals that hold the true value


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return the lower and upper end of a 95 % interval for a rate, by E. Wilson's score method (1927).

    It stays within 0 and 1, and has a width also where all or none succeeded: one success of one proves little.
    """
    if n == 0:
        return 0.0, 1.0
    squared = statistics.NormalDist().inv_cdf((1 + _LEVEL) / 2) ** 2
    middle = successes + squared / 2
    reach = math.sqrt(squared * (successes * (n - successes) / n + squared / 4))
    lower, upper = (middle - reach) / (n + squared), (middle + reach) / (n + squared)
    return (lower if successes else 0.0, upper if successes < n else 1.0)  # exact, where rounding leaves 1e-17
