"""The machine's memory: how much this process may use, and whether it is short.

- macOS says itself whether memory is short (`kern.memorystatus_vm_pressure_level`).
- Linux does not. Memory is short there if little of it is available, on the machine or within a limit of this process's
  control groups; or if programs have lately been stopped for lack of it (pressure stall information).
- Elsewhere nothing is known.

No MLX in this file.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import enum
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from onefold.sizes import show_size


class Level(enum.IntEnum):
    NORMAL = 0
    WARN = 1
    CRITICAL = 2


class Reading(NamedTuple):
    level: Level
    why: str
    """The figures behind the level, for the log."""
    spare_bytes: int | None = None
    """Bytes that programs can take before memory is short; None if that is not known."""


NOTHING_KNOWN = Reading(Level.NORMAL, "nothing is known of this machine's memory")

WARN_SHARE, WARN_MOST = 12, 4 << 30
"""Memory is short with less than a twelfth of it available, and never with more than 4 GiB."""
CRITICAL_SHARE, CRITICAL_MOST = 24, 2 << 30
WARN_STALLED, CRITICAL_STALLED = 20.0, 10.0
"""Per cent of the last ten seconds in which some program (WARN), or all of them (CRITICAL), waited for memory."""


def total_bytes() -> int:
    """Returns how many bytes this process may use: the machine's memory, or less if a control group limits it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = limit_bytes()
    return machine if limit is None else min(machine, limit)


def limit_bytes(root: Path = Path("/")) -> int | None:
    """Returns the least limit of this process's control groups; None if there is none, or it cannot be read."""
    return min((limit for limit, _ in _groups(root)), default=None)


def give_back_free_memory() -> None:
    """Returns to the machine what this process's allocator keeps of freed memory. glibc keeps much of it, in pieces
    between others that are in use; other allocators return it by themselves."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def gauge() -> Callable[[], Reading] | None:
    """Returns the function that reads this machine's memory; None if nothing can be known of it."""
    if sys.platform == "darwin":
        return macos
    return linux if sys.platform == "linux" else None


# -- macOS -----------------------------------------------------------------------------------------

_MACOS_LEVELS = {1: Level.NORMAL, 2: Level.WARN, 4: Level.CRITICAL}


def macos(sysctl: Callable[[str], int | None] | None = None) -> Reading:
    """Returns what macOS says. Reads normal where it says nothing."""
    read = sysctl or read_sysctl
    found = read("kern.memorystatus_vm_pressure_level")
    if found is None:
        return NOTHING_KNOWN
    free = read("kern.memorystatus_level")
    level = _MACOS_LEVELS.get(found, Level.NORMAL)
    return Reading(level, f"macOS's pressure level is {found}" + ("" if free is None else f", {free} % are free"))


def read_sysctl(name: str) -> int | None:
    """Returns a number that the kernel of macOS publishes; None where there is none of that name."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    if not hasattr(libc, "sysctlbyname"):
        return None
    value = ctypes.c_uint64(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    if libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return value.value & 0xFFFFFFFF if size.value == 4 else value.value


# -- Linux -----------------------------------------------------------------------------------------


def linux(root: Path = Path("/")) -> Reading:
    """Returns what Linux's figures mean. Reads normal where they cannot be read."""
    rooms = [(limit - used, limit, "of this control group's limit of ") for limit, used in _groups(root)]
    found = _fields(root / "proc/meminfo")
    if "MemAvailable" in found and found.get("MemTotal"):
        rooms.append((found["MemAvailable"] * 1024, found["MemTotal"] * 1024, "of "))
    if not rooms:
        return NOTHING_KNOWN
    level, why, spare = Level.NORMAL, "", min(room - min(total // WARN_SHARE, WARN_MOST) for room, total, _ in rooms)
    for room, total, of in sorted(rooms, key=lambda r: r[0] / r[1], reverse=True):
        if (reached := _level_of(max(0, room), total)) >= level:
            least = show_size(min(total // WARN_SHARE, WARN_MOST))
            level, why = reached, f"{show_size(max(0, room))} {of}{show_size(total)} are available; short below {least}"
    some, full = _stalled(root)
    if full >= CRITICAL_STALLED:
        level, why = Level.CRITICAL, f"{why}, and programs waited for memory in {full:.0f} % of the last 10 s"
    elif some >= WARN_STALLED and level is Level.NORMAL:
        level, why = Level.WARN, f"{why}, and some program waited for memory in {some:.0f} % of the last 10 s"
    return Reading(level, why, max(0, spare))


def _level_of(available: int, total: int) -> Level:
    if available < min(total // CRITICAL_SHARE, CRITICAL_MOST):
        return Level.CRITICAL
    return Level.WARN if available < min(total // WARN_SHARE, WARN_MOST) else Level.NORMAL


def _stalled(root: Path) -> tuple[float, float]:
    """Returns the percentages of time, in the last ten seconds, in which some and all programs waited for memory."""
    worst = {"some": 0.0, "full": 0.0}
    places = [root / "proc/pressure/memory", *(folder / "memory.pressure" for folder in _folders_v2(root))]
    for place in places:
        for line in _text(place).splitlines():
            kind, _, rest = line.partition(" avg10=")
            number = rest.partition(" ")[0]
            if kind in worst and number.replace(".", "", 1).isdigit():
                worst[kind] = max(worst[kind], float(number))
    return worst["some"], worst["full"]


# -- control groups ---------------------------------------------------------------------------------


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and the use of every control group of this process that has a limit, in bytes. Files that the
    kernel would drop when memory is short do not count as used: the inactive ones, and half of the others."""
    layouts = (
        (_folders_v2(root), "memory.max", "memory.current", ""),
        (_folders_v1(root), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    )
    for folders, most, now, total in layouts:
        for folder in folders:
            limit, used = _number(folder / most), _number(folder / now)
            if limit is not None and 0 < limit < 1 << 60:  # version 1 writes about 2⁶³ for no limit
                files = _fields(folder / "memory.stat")
                kept = files.get(f"{total}inactive_file", 0) + files.get(f"{total}active_file", 0) // 2
                yield limit, max(0, (used or 0) - kept)


def _folders_v2(root: Path) -> list[Path]:
    return _upwards(root / "sys/fs/cgroup", _path_of(root, lambda controllers: controllers == ""))


def _folders_v1(root: Path) -> list[Path]:
    path = _path_of(root, lambda controllers: "memory" in controllers.split(","))
    return _upwards(root / "sys/fs/cgroup/memory", path)


def _path_of(root: Path, wanted: Callable[[str], bool]) -> str:
    """Returns this process's control group, as a path below the mount point; nothing if it is not known."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if wanted(controllers):
            return path.strip("/")
    return ""


def _upwards(mount: Path, path: str) -> list[Path]:
    """Returns the folder of a control group and those above it. In a container the path may be that of the host: then
    the mount point is the group itself."""
    folder = mount / path
    found = [folder]
    while folder != mount and mount in folder.parents:
        folder = folder.parent
        found.append(folder)
    return found


def _fields(file: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number in each line."""
    found = {}
    for line in _text(file).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
