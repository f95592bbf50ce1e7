"""When a process of ours looks for garbage: between steps, and among what came after the warm-up.

Python looks for cycles whenever enough objects were made, which is in the middle of a step, and all of a model's
modules count as objects to look at. So what exists after the warm-up is frozen (nobody looks at it again), a step alone
hardly reaches the threshold, and the loop looks by itself while nothing waits.
"""

from __future__ import annotations

import gc

IN_STEP = (20_000, 20, 20)
"""Python's thresholds afterwards. A step of 256 rows makes 512 outputs and frees them: with Python's own thresholds
that alone is a collection every other step. They are not off: a method that runs for hours has no steps."""
ENOUGH = 1_000
"""Objects (more made than freed) for which it is worth a look between steps."""
FULL_EVERY = 20
"""One look in so many is at all that is not frozen."""


class Garbage:
    """One of each loop."""

    def __init__(self) -> None:
        self._looks = 0

    def freeze(self) -> None:
        """What was made so far lives as long as the process."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*IN_STEP)

    def between_steps(self) -> None:
        """Nothing waits: look, if there may be something."""
        if gc.get_count()[0] < ENOUGH:
            return
        self._looks += 1
        gc.collect(2 if self._looks % FULL_EVERY == 0 else 1)
