"""What kinds of devices there are, and which this machine has. Imports no torch.

``resolve_platform(name).device_table()`` is what configurations are checked against. A platform of one's own is a
subclass of :class:`Platform`, registered as an entry point of the group ``drumline.platforms``.
"""

from __future__ import annotations

from drumline.platforms.base import DeviceFacts, DeviceMemory, Diagnosis, Platform
from drumline.platforms.cpu import CpuPlatform
from drumline.platforms.cuda import CudaPlatform
from drumline.platforms.resolve import ENTRY_POINT_GROUP, device_table, resolve_platform

__all__ = [
    "ENTRY_POINT_GROUP",
    "CpuPlatform",
    "CudaPlatform",
    "DeviceFacts",
    "DeviceMemory",
    "Diagnosis",
    "Platform",
    "device_table",
    "resolve_platform",
]
