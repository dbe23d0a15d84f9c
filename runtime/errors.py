"""Errors of the process layer.

RuntimeLayerError
├── ChannelClosed      the other end of a lifeline ended or closed it
├── WarmParentError    the warm parent could not be reached or could not fork; the message says where its log is
├── ChildDied          the forked process ended before it answered
│   └── SupervisorDied it ended with its supervisor
├── ChildTimeout       the forked process is alive but did not answer in time
├── CopyFailed         a directory could not be copied from another node: it or the node is gone
└── ChildError         the forked process answered with an exception of its own
"""

from __future__ import annotations


class RuntimeLayerError(Exception):
    """Base of all errors raised by `runtime`. `args` are the constructor's arguments, so that pickle can rebuild it: a
    supervisor in an actor raises it at its caller."""


class ChannelClosed(RuntimeLayerError): ...


class WarmParentError(RuntimeLayerError): ...


class ChildDied(RuntimeLayerError):
    """The forked process ended. starved: the kernel's OOM killer ran at that moment."""

    def __init__(self, name: str, pid: int, log_path: str, log_tail: str = "", starved: bool = False):
        super().__init__(name, pid, log_path, log_tail, starved)
        self.name, self.pid, self.log_path, self.log_tail, self.starved = name, pid, log_path, log_tail, starved

    def __str__(self) -> str:
        tail = f"; the log ends with:\n{self.log_tail}" if self.log_tail else ""
        how = "was killed because the host's memory ran out" if self.starved else "died"
        return f"process {self.name} (pid {self.pid}) {how}; its log is {self.log_path}{tail}"


class SupervisorDied(ChildDied):
    """A supervisor died, and the process on its lifeline ended with it."""

    def __init__(self, name: str, why: str):
        super().__init__(name, 0, "", why)
        self.args = (name, why)

    def __str__(self) -> str:
        return f"the supervisor {self.name} died: {self.log_tail}"


class ChildTimeout(RuntimeLayerError): ...


class CopyFailed(RuntimeLayerError): ...


class ChildError(RuntimeLayerError):
    """An exception that the forked process raised: its name, message and `data`."""

    def __init__(self, type_name: str, message: str, data: dict | None = None):
        super().__init__(type_name, message, data)
        self.type, self.message, self.data = type_name, message, data or {}

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


def words_of_check(message: str) -> str:
    """The message of a validator of ours without pydantic's prefix."""
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
