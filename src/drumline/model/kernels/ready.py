"""Importing this module makes the kernels ready: read from disk (0.2 s), or compiled (some 10 s, once a machine).

A fork server imports it before it forks workers that compute on CPUs, so that all of them have the kernels at once.
"""

from __future__ import annotations

from drumline.model.kernels import draw, step

# By arguments alone, as a call asks for them: what is kept on disk is found by exactly what was asked for, so that a
# process that calls them without this module does not compile them a second time.
step.run.compile(step.SIGNATURE.args)  # type: ignore[attr-defined]
draw.draw.compile(draw.SIGNATURE.args)  # type: ignore[attr-defined]
