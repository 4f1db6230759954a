"""CPU and memory of whole process trees, read from /proc.

Every benchmark run uses it, with one root per part: the system under test, Postgres, the broker,
the mock. The figures include finished children: the record of a parent that waited for them has
their time, and for orphans the last sample is kept. Must not: influence the processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_CPU_INTERVAL_S = 0.2
_MEMORY_EVERY = 5  # samples; reading PSS walks the page tables of the process


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One line of /proc/PID/stat; `reaped` is the CPU time of its reaped children."""

    pid: int
    parent: int
    started: int
    own: int
    reaped: int

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time, which differ if a pid is reused."""
        return self.pid, self.started


@dataclass(slots=True)
class TreeUsage:
    """The usage of one tree; memory peaks are those since the meter began to sample."""

    cpu_s: float = 0.0
    peak_process_rss_bytes: int = 0
    peak_tree_pss_bytes: int = 0


class ProcessMeter:
    """Adds up the usage of named trees. A root inside another root's tree counts only as itself."""

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._roots = {pid: name for name, pid in roots.items()}
        self._members: dict[tuple[int, int], tuple[str, ProcessRecord]] = {}
        self._gone_ticks = dict.fromkeys(roots, 0)
        self._peak_rss = dict.fromkeys(roots, 0)
        self._peak_pss = dict.fromkeys(roots, 0)
        self._lock = threading.Lock()
        missing = [
            f"{name} ({pid})" for name, pid in roots.items() if not Path(f"/proc/{pid}").exists()
        ]
        if missing:
            raise ValueError(f"no such process: {', '.join(missing)}")
        self._scan()

    def usage(self) -> dict[str, TreeUsage]:
        """CPU since each root was started, and the memory peaks."""
        with self._lock:
            self._scan()
            ticks = dict(self._gone_ticks)
            for name, record in self._members.values():
                ticks[name] += record.own + record.reaped
            return {
                name: TreeUsage(ticks[name] * _TICK_S, self._peak_rss[name], self._peak_pss[name])
                for name in ticks
            }

    @contextmanager
    def measuring(self) -> Iterator[dict[str, TreeUsage]]:
        """Sample during the block; afterwards the yielded dict has the usage of the block."""
        before = self.usage()
        used: dict[str, TreeUsage] = {}
        stop = threading.Event()
        sampler = threading.Thread(target=self._sample_until, args=(stop,), daemon=True)
        sampler.start()
        try:
            yield used
        finally:
            stop.set()
            sampler.join()
            self._read_memory()
            for name, after in self.usage().items():
                after.cpu_s -= before[name].cpu_s
                used[name] = after

    def _sample_until(self, stop: threading.Event) -> None:
        samples = 0
        while not stop.wait(_CPU_INTERVAL_S):
            with self._lock:
                self._scan()
            if samples % _MEMORY_EVERY == 0:
                self._read_memory()
            samples += 1

    def _scan(self) -> None:
        alive = {record.pid: record for record in read_processes()}
        members: dict[tuple[int, int], tuple[str, ProcessRecord]] = {}
        for record in alive.values():
            known = self._members.get(record.key)
            # Membership is permanent, so that an orphan still belongs to its original tree.
            name = known[0] if known else self._tree_of(record, alive)
            if name is not None:
                members[record.key] = name, record
        parents = {record.pid for _, record in self._members.values()}
        for key, (name, record) in self._members.items():
            # If a member reaped the process, that member's record has its time; otherwise keep it.
            if key not in members and record.parent not in parents:
                self._gone_ticks[name] += record.own + record.reaped
        self._members = members

    def _tree_of(self, record: ProcessRecord, alive: Mapping[int, ProcessRecord]) -> str | None:
        ancestor: ProcessRecord | None = record
        while ancestor is not None:
            if ancestor.pid in self._roots:
                return self._roots[ancestor.pid]
            if known := self._members.get(ancestor.key):
                return known[0]
            ancestor = alive.get(ancestor.parent)
        return None

    def _read_memory(self) -> None:
        with self._lock:
            members = list(self._members.values())
        pss = dict.fromkeys(self._peak_pss, 0)
        for name, record in members:
            self._peak_rss[name] = max(
                self._peak_rss[name], _read_kib(record.pid, "status", "VmHWM:")
            )
            pss[name] += _read_kib(record.pid, "smaps_rollup", "Pss:")
        for name, size in pss.items():
            self._peak_pss[name] = max(self._peak_pss[name], size)


def read_processes() -> Iterator[ProcessRecord]:
    """Yield all processes, except those that end during the reading."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (record := _read_record(int(entry.name))):
            yield record


def cpu_s(pid: int) -> float:
    """Return the CPU time of one process without its children; 0 if it has ended."""
    record = _read_record(pid)
    return record.own * _TICK_S if record else 0.0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of one process without its children; 0 if it has ended."""
    return _read_kib(pid, "status", "VmRSS:")


def _read_record(pid: int) -> ProcessRecord | None:
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None
    # The name in parentheses may itself contain blanks and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessRecord(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        own=int(fields[11]) + int(fields[12]),
        reaped=int(fields[13]) + int(fields[14]),
    )


def _read_kib(pid: int, file: str, field: str) -> int:
    """Return a field of a status file in bytes; 0 for a process that has ended or is hidden."""
    for line in _read(f"/proc/{pid}/{file}").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
