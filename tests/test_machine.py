"""What the machine's files say about its memory, read from folders that stand for /proc and /sys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onefold import machine
from onefold.machine import Level

GB = 1 << 30


class Machine:
    """A folder with the files of Linux that are read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def memory(self, total: int, available: int) -> None:
        self.write(
            "proc/meminfo", f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"
        )

    def read(self) -> machine.Reading:
        return machine.linux(self.root)


@pytest.fixture
def linux(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("total, available, level", [
    (24 * GB, 12 * GB, Level.NORMAL),
    (24 * GB, int(1.9 * GB), Level.WARN),
    (24 * GB, int(0.9 * GB), Level.CRITICAL),
    (512 * GB, 5 * GB, Level.NORMAL),
    (512 * GB, 3 * GB, Level.WARN),
    (512 * GB, 1 * GB, Level.CRITICAL),
    (8 * GB, 0, Level.CRITICAL),
])  # fmt: skip
def test_available_memory(linux: Machine, total: int, available: int, level: Level) -> None:
    linux.memory(total, available)
    found = linux.read()
    assert found.level is level
    assert (found.spare_bytes == 0) == (level is not Level.NORMAL)
    assert "available" in found.why


def test_a_machine_that_says_nothing(linux: Machine) -> None:
    assert linux.read() == machine.NOTHING_KNOWN
    linux.write("proc/meminfo", "nonsense\nMemTotal:\nMemAvailable: many kB\n")
    linux.write("proc/pressure/memory", "some avg10= total\nfull\n")
    linux.write("proc/self/cgroup", "nonsense\n\n::\n")
    assert linux.read() == machine.NOTHING_KNOWN
    assert machine.limit_bytes(linux.root) is None


@pytest.mark.parametrize("some, full, level", [(5, 0, 0), (25, 0, 1), (25, 5, 1), (60, 15, 2)])
def test_programs_that_waited_for_memory(linux: Machine, some: float, full: float, level: int) -> None:
    linux.memory(24 * GB, 12 * GB)
    lines = (
        f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10={full:.2f} avg60=0.00 avg300=0.00 total=1"
    )
    linux.write("proc/pressure/memory", lines)
    assert linux.read().level == level


V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "")
V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@pytest.mark.parametrize("version", [V2, V1], ids=["version 2", "version 1"])
@pytest.mark.parametrize("group", ["", "a/b"])
def test_a_limit_of_a_control_group(linux: Machine, version: tuple[str, ...], group: str) -> None:
    """Of the group itself, or of one above it. Files that the kernel can drop are not used."""
    mount, limit, used, total = version
    linux.memory(24 * GB, 20 * GB)
    linux.write("proc/self/cgroup", f"4:memory:/{group}\n0::/{group}\n")
    place = f"{mount}/{group.split('/')[0]}"
    linux.write(f"{place}/{limit}", f"{4 * GB}\n")
    linux.write(f"{place}/memory.stat", f"{total}inactive_file {GB}\n{total}active_file {GB}\nfile 1\n")
    for level, left in ((Level.NORMAL, 1.0), (Level.WARN, 0.08), (Level.CRITICAL, 0.02)):
        linux.write(f"{place}/{used}", f"{int((4 - 4 * left) * GB) + 3 * GB // 2}\n")
        assert machine.limit_bytes(linux.root) == 4 * GB
        found = linux.read()
        assert found.level is level and ("control group" in found.why) == (level is not Level.NORMAL)


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", "", "nonsense\n"])
def test_no_limit(linux: Machine, text: str) -> None:
    linux.memory(24 * GB, 20 * GB)
    for mount, limit, _, _ in (V1, V2):
        linux.write(f"{mount}/{limit}", text)
    assert machine.limit_bytes(linux.root) is None and linux.read().level is Level.NORMAL


@pytest.mark.parametrize("said, level", [(1, 0), (2, 1), (4, 2), (3, 0), (None, 0)])
def test_macos(said: int | None, level: int) -> None:
    found = machine.macos({"kern.memorystatus_vm_pressure_level": said, "kern.memorystatus_level": 40}.get)
    assert found.level == level and found.spare_bytes is None
    assert found == machine.NOTHING_KNOWN if said is None else f"level is {said}, 40 % are free" in found.why


def test_this_machine() -> None:
    gauge = machine.gauge()
    assert machine.total_bytes() > 1 << 28
    if gauge is None:
        pytest.skip(f"{sys.platform} says nothing of its memory")
    assert gauge().why != machine.NOTHING_KNOWN.why
