"""Processes of this machine: which live, which descend from one, and where they listen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def descendants(root: int) -> list[int]:
    """Processes that descend from one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = list(parents.get(root, []))
    for process in found:
        found += parents.get(process, [])
    return found


def alive(process: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def listening(processes: Iterable[int]) -> Iterator[tuple[bool, int]]:
    """Of each listening socket: whether only this machine reaches it, and its port."""
    ours = set()
    for process in processes:
        try:
            targets = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:  # closed or ended meanwhile
            continue
        ours |= {target[8:-1] for target in targets if target.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in ours:
                address, _, port = fields[1].partition(":")
                yield address in _LOOPBACK, int(port, 16)
