"""Module whose import makes the machine code of :mod:`native` ready: what a fork server does before it forks."""

from __future__ import annotations

from drumline.transport.native import native

READY = native() is not None
"""Whether there is machine code here."""
