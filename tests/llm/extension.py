"""Methods that the tests mix into the worker."""

from __future__ import annotations


class Extension:
    rank: int

    def add_rank(self, base: int) -> int:
        return base + self.rank

    def fail(self) -> None:
        raise RuntimeError("no such luck")


class Broken:
    def load_model(self) -> None:
        raise RuntimeError("broken weights")
