"""How sure a measured rate is."""

import math
from typing import NamedTuple


class Rate(NamedTuple):
    """`hits` of `total`, and the ends of a 95 % interval, all as fractions of 1 where they are rates."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        """hits / total; 0 of nothing is 0."""
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval at 95 % (Wilson 1927): honest near 0 and 1, and for few trials.

        >>> low, high = Rate(0, 10).interval
        >>> round(low, 3), round(high, 3)
        (0.0, 0.278)
        """
        if not self.total:
            return 0.0, 1.0
        z, n, p = 1.959963984540054, self.total, self.value
        center = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, center - half), min(1.0, center + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({self.hits}/{self.total}, 95 % interval {low:.1%} to {high:.1%})"

    def as_json(self) -> dict[str, float]:
        """For `--json`."""
        low, high = self.interval
        return {"rate": self.value, "hits": self.hits, "total": self.total, "low_95": low, "high_95": high}
