"""Where the ranks of one machine stand in their collectives, as whoever started them sees it. No torch here.

The sequence words through which ranks meet (:mod:`drumline.parallel.meeting`) are numbers of their collectives already,
and a rank that sleeps in one says so in the word behind it, with the operation. So nothing has to be counted for a
report: this maps the words (not the slots) and reads them. The same of the rings between pipeline stages.

Collectives on a device (NCCL, symmetric memory) do not go through that memory, so each rank numbers there what it gives
to its device (``meeting.Numbers``). The number says what a rank has asked for, not how far its device is; a rank whose
number is lower than the others' is who they wait for. What CUDA graphs replay is not numbered.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drumline.parallel.boxes import OPERATIONS, OTHER, Boxes
from drumline.parallel.layout import GroupKind, Layout

_BEHIND = 0x80000000


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One rank in one group."""

    rank: int
    kind: GroupKind
    ranks: tuple[int, ...]
    """Of the group."""
    number: int
    """Of the last collective that the rank has come to (modulo 2^32; large tensors take several)."""
    operation: str = ""
    """What it sleeps in: ``all_reduce``, ``recv`` ...; empty: it does not wait here."""
    waits_for: tuple[int, ...] = ()
    """Ranks that have not come to it."""
    on_device: bool = False
    """``number`` counts what the rank gave to its device; ``operation`` is the last of it, whoever is waited for."""

    def text(self) -> str:
        """``waits in all_reduce 812 of tp ranks 0, 1 for rank 1``, ``has come to collective 811 of tp ranks 0, 1``."""
        group = f"{self.kind.value} ranks {listed(self.ranks)}"
        if self.on_device:
            behind = f"; behind: {listed(self.waits_for)}" if self.waits_for else ""
            return f"has given {self.operation} {self.number} of {group} to its device{behind}"
        if not self.operation:
            return f"has come to collective {self.number} of {group}"
        missing = f"rank{'s' * (len(self.waits_for) != 1)} {listed(self.waits_for)}"
        if self.operation in ("send", "recv"):
            return f"waits in {self.operation} of {group} for {missing}"
        return f"waits in {self.operation} {self.number} of {group} for {missing}"


def listed(ranks: Iterable[int]) -> str:
    """``0, 1``."""
    return ", ".join(map(str, ranks))


class Standings:
    """A read-only view of the words of one world.

    ``fd`` (of ``Rendezvous.memory``) stays the caller's, who may close it right after.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self._layout = layout
        self._boxes = boxes = Boxes(layout.size)
        self._map = mmap.mmap(fd, boxes.control_bytes, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("I")
        self._groups = [(kind, group) for kind, groups in layout.groups.items() for group in groups if len(group) > 1]

    def words(self, rank: int) -> bytes:
        """All words that a rank writes: if they change, it goes on."""
        boxes, words = self._boxes, self._words
        at = [boxes.word_at(kind, rank) // 4 for kind in GroupKind]
        at += [boxes.sent_at(rank) // 4, *(boxes.taken_at(other) // 4 for other in self._before(rank))]
        return b"".join(words[place : place + 4].tobytes() for place in at)

    def read(self) -> list[Standing]:
        """All ranks in all groups in which anything has happened, in the order of ranks, groups and kinds."""
        found = []
        for kind, group in self._groups:
            found += self._of_group(kind, group)
            found += self._of_device(kind, group)
        for rank in range(self._layout.size):
            found += self._of_mail(rank)
        return sorted(found, key=lambda one: (one.rank, one.ranks))

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._words.release()
        self._map.close()

    def _of_group(self, kind: GroupKind, group: Sequence[int]) -> list[Standing]:
        words = self._words
        at = {rank: self._boxes.word_at(kind, rank) // 4 for rank in group}
        marks = {rank: words[place + 1] for rank, place in at.items()}  # before the numbers: a rank unmarks after them
        numbers = {rank: words[place] for rank, place in at.items()}
        standings = []
        for rank, number in numbers.items():
            if not number:
                continue
            behind = tuple(other for other in group if (numbers[other] - number) & _BEHIND)
            waits = bool(marks[rank] and behind)
            operation = OPERATIONS[min(marks[rank], OTHER)] if waits else ""
            standings.append(
                Standing(
                    rank=rank,
                    kind=kind,
                    ranks=tuple(group),
                    number=number,
                    operation=operation,
                    waits_for=behind if waits else (),
                )
            )
        return standings

    def _of_device(self, kind: GroupKind, group: Sequence[int]) -> list[Standing]:
        words = self._words
        at = {rank: self._boxes.device_at(kind, rank) // 4 for rank in group}
        numbers = {rank: words[place] for rank, place in at.items()}
        return [
            Standing(
                rank=rank,
                kind=kind,
                ranks=tuple(group),
                number=number,
                operation=OPERATIONS[min(words[at[rank] + 1], OTHER)],
                waits_for=tuple(other for other in group if (numbers[other] - number) & _BEHIND),
                on_device=True,
            )
            for rank, number in numbers.items()
            if number
        ]

    def _of_mail(self, rank: int) -> list[Standing]:
        """Waits between pipeline stages."""
        boxes, words, group = self._boxes, self._words, self._layout.group_of(GroupKind.PP, rank)
        if len(group) < 2:
            return []
        standings = []
        after = group[(group.index(rank) + 1) % len(group)]
        ends = [("send", boxes.sent_at(rank), after)]
        ends += [("recv", boxes.taken_at(before), before) for before in self._before(rank)]
        for operation, place, peer in ends:
            if words[place // 4 + 1]:
                standings.append(
                    Standing(
                        rank=rank,
                        kind=GroupKind.PP,
                        ranks=group,
                        number=words[place // 4],
                        operation=operation,
                        waits_for=(peer,),
                    )
                )
        return standings

    def _before(self, rank: int) -> tuple[int, ...]:
        """The member before it in its pipeline group."""
        group = self._layout.group_of(GroupKind.PP, rank)
        return () if len(group) < 2 else (group[group.index(rank) - 1],)
