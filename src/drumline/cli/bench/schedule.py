"""When requests are sent. Pure."""

from __future__ import annotations

import math
import random


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which each of ``count`` requests is due; the first at 0.

    ``rate``: requests a second; infinite: all at once. ``burstiness``: shape of the gamma distribution of the gaps; 1
    is a Poisson process, below 1 comes in bursts, above 1 more evenly. The mean gap is 1 / rate whatever the shape.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError("rate and burstiness must be above 0")
    if math.isinf(rate):
        return [0.0] * count
    chance = random.Random(f"arrivals {seed}")
    due, found = 0.0, []
    for _ in range(count):
        found.append(due)
        due += chance.gammavariate(burstiness, 1 / (rate * burstiness))
    return found
