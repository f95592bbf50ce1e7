"""Importing this module makes the kernels ready: read from disk (0.2 s), or compiled (some 10 s, once a machine).

A fork server imports it before it forks workers that compute on CPUs, so that all of them have the kernels at once.
"""

from __future__ import annotations

from drumline.model.kernels import draw, step

step.run.compile(step.SIGNATURE)  # type: ignore[attr-defined]
draw.draw.compile(draw.SIGNATURE)  # type: ignore[attr-defined]
