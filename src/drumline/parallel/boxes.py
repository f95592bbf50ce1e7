"""Where everything is in the memory through which the ranks of one machine do their collectives. Pure arithmetic.

::

    member lines   one a rank: pid, PID namespace, "has left"
    words          one line a (group kind, rank): sequence word of that rank in its group of that kind, whether it
                   sleeps (and in which operation), the number of its last collective on the device and which that was,
                   and that group's gate, if the rank is its first
    mail words     two a rank: how much was written into its ring, how much read from it; behind each: whether its
                   writer sleeps
    slots          three a (group kind, rank): what that rank shows to the others
    rings          one a rank: its messages to the next pipeline stage (drumline.parallel.mail)

A rank is in one group of each kind, so (kind, rank) names a box without any table: the places do not depend on the
layout of the world, only on its size, and whoever makes the memory need not know which groups there will be. Most
boxes are never touched and take address space only: pages of a memfd come with the first touch.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.parallel.layout import GroupKind

LINE = 128
"""Bytes between words of different ranks: two cache lines of x86-64, which fetches them in pairs."""
SLOT_BYTES = 1 << 20
"""Bytes that a rank can show at once; longer tensors go in pieces. Half as much was as fast with a core for each rank,
and a fifth slower with two ranks on each core."""
SLOTS = 3
"""Slots of a rank in a group; why so many: :mod:`drumline.parallel.shm`."""
MAIL_BYTES = 4 << 20
"""Bytes of a ring; a power of two, at most 2^31."""

OPERATIONS = (
    "",
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
    "broadcast_object",
    "all_gather_object",
    "send",
    "recv",
    "gather",
    "reduce_scatter",
    "all_to_all",
    "a collective",
)
"""What a rank that sleeps in one of these puts, as a number, into the word behind its sequence word: for reports. The
last one stands for all others."""
MARKS = {name: number for number, name in enumerate(OPERATIONS) if name}
OTHER = len(OPERATIONS) - 1

_KINDS = {kind: index for index, kind in enumerate(GroupKind)}
_PAGE = 4096


@dataclass(frozen=True)
class Boxes:
    """Offsets in bytes for a world of ``ranks`` ranks on this machine."""

    ranks: int

    def member_at(self, rank: int) -> int:
        """The member line of a rank."""
        return rank * LINE

    def word_at(self, kind: GroupKind, rank: int) -> int:
        """The sequence word of a rank in its group of this kind."""
        return (self.ranks + self._box(kind, rank)) * LINE

    def device_at(self, kind: GroupKind, rank: int) -> int:
        """The number of the last collective that a rank gave to its device in its group of this kind."""
        return self.word_at(kind, rank) + 8

    def gate_at(self, kind: GroupKind, rank: int) -> int:
        """The word on which the members of the group of this kind sleep whose first member is ``rank``."""
        return self.word_at(kind, rank) + LINE // 2

    def slot_at(self, kind: GroupKind, rank: int, number: int) -> int:
        """One of the slots of a rank in its group of this kind."""
        return self.control_bytes + (SLOTS * self._box(kind, rank) + number) * SLOT_BYTES

    def sent_at(self, rank: int) -> int:
        """The word that counts the bytes which a rank has written into its ring."""
        return ((1 + len(_KINDS)) * self.ranks + rank) * LINE

    def taken_at(self, rank: int) -> int:
        """The word that counts the bytes which were read from a rank's ring."""
        return ((2 + len(_KINDS)) * self.ranks + rank) * LINE

    def mail_at(self, rank: int) -> int:
        """The ring of a rank."""
        return self.control_bytes + SLOTS * len(_KINDS) * self.ranks * SLOT_BYTES + rank * MAIL_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole memory."""
        return self.mail_at(self.ranks)

    @property
    def control_bytes(self) -> int:
        """Bytes of member lines and words, which come first."""
        return -(-(3 + len(_KINDS)) * self.ranks * LINE // _PAGE) * _PAGE

    def _box(self, kind: GroupKind, rank: int) -> int:
        return _KINDS[kind] * self.ranks + rank
