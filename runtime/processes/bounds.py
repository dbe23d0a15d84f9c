"""What a process that reads somebody else's file is held to: its parent's life, CPU time and memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as


@dataclass(frozen=True, slots=True)
class Bounds:
    cpu_s: int
    memory_bytes: int

    def hold(self) -> None:
        """Bounds this process from now on. Where the host's memory is short, it dies before engines and ranks."""
        die_with_parent()
        dies_as(DiesAs.TRIAL)
        resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_s, self.cpu_s + 1))  # SIGXCPU, which no lack of memory sends
        resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, self.memory_bytes))  # not AS: arrays are mapped
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def how_it_ended(self, status: int, last_words: str = "") -> str:
        """Says for people how a process ended that gave no answer. status: as subprocess has it."""
        how = f"signal {-status}" if status < 0 else f"status {status}"
        limits = f"{self.cpu_s} s of CPU and {self.memory_bytes >> 30} GiB of memory"
        return f"{limits} (it ended with {how}{': ' if last_words else ''}{last_words})"
