"""Which platform is meant: a name, or the best that this machine has."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points

from drumline.config import DeviceTable
from drumline.errors import ConfigError
from drumline.platforms.base import Platform
from drumline.platforms.cpu import CpuPlatform
from drumline.platforms.cuda import CudaPlatform

ENTRY_POINT_GROUP = "drumline.platforms"
"""An entry point of this group names a Platform subclass (or a callable that gives a platform)."""

BUILT_IN: dict[str, type[Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}

log = logging.getLogger(__name__)


def resolve_platform(name: str = "auto") -> Platform:
    """The platform of that name; ``auto``: an installed one that is available, else cuda if it has a device, else cpu.

    Raises ConfigError for an unknown name, one that cannot be loaded, or if several installed ones are available.
    """
    if name == "auto":
        return _best()
    if name in BUILT_IN:
        return BUILT_IN[name]()
    others = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in others:
        known = ", ".join(["auto", *BUILT_IN, *sorted(others)])
        raise ConfigError(f"platform must be one of {known}, not {name!r}")
    return _load(others[name])


def device_table(name: str = "auto") -> DeviceTable:
    """What the platform of that name finds on this machine."""
    return resolve_platform(name).device_table()


def _best() -> Platform:
    found: list[Platform] = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            platform = _load(point)
            if platform.is_available():
                found.append(platform)
        except Exception as error:  # noqa: BLE001  a broken plug-in must not keep the others from working
            log.warning("platform %s is installed but cannot be used: %s", point.name, error)
    if len(found) > 1:
        names = ", ".join(sorted(platform.name for platform in found))
        raise ConfigError(f"several installed platforms are available ({names}): choose one by its name")
    if found:
        return found[0]
    cuda = CudaPlatform()
    return cuda if cuda.is_available() else CpuPlatform()


def _load(point: EntryPoint) -> Platform:
    try:
        platform = point.load()()
    except Exception as error:
        raise ConfigError(f"platform {point.name!r} ({point.value}) cannot be loaded: {error}") from error
    if not isinstance(platform, Platform):
        raise ConfigError(f"platform {point.name!r} ({point.value}) is no drumline.platforms.Platform: {platform!r}")
    return platform
