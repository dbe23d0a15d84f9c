"""Errors of the process layer.

RuntimeLayerError
├── ChannelClosed      the other end of a lifeline is gone
├── FrameTooLarge      a frame exceeds the limit: the peer does not speak this protocol
├── WarmParentError    the warm parent could not be reached or could not fork
├── ChildDied          the forked process ended during a call
│   └── SupervisorDied it ended with its supervisor
├── ChildTimeout       the forked process did not answer in time
├── CopyFailed          a directory could not be copied from another node
└── ChildError         the forked process answered with an exception of its own
"""

from __future__ import annotations


class RuntimeLayerError(Exception):
    """Base of all errors raised by `runtime`. Picklable, because a supervisor in an actor raises it at its caller."""

    _given: tuple | None = None

    def __reduce__(self):
        return type(self), self._given if self._given is not None else self.args


class ChannelClosed(RuntimeLayerError):
    """The socket reached end of file because the peer process ended or closed it."""


class FrameTooLarge(RuntimeLayerError):
    """A frame announces more bytes than any message of ours has."""

    def __init__(self, length_bytes: int, limit_bytes: int):
        self._given = (length_bytes, limit_bytes)
        super().__init__(
            f"frame of {length_bytes} bytes refused, the limit is {limit_bytes}: "
            "the peer does not speak the lifeline protocol"
        )


class WarmParentError(RuntimeLayerError):
    """The warm parent did not fork a process; the message says why and where its log is."""


class ChildDied(RuntimeLayerError):
    """The forked process ended before it answered. starved: the kernel's OOM killer ran at that moment."""

    def __init__(self, name: str, pid: int, log_path: str, log_tail: str = "", starved: bool = False):
        tail = f"; the log ends with:\n{log_tail}" if log_tail else ""
        how = "was killed because the host's memory ran out" if starved else "died"
        super().__init__(f"process {name} (pid {pid}) {how}; its log is {log_path}{tail}")
        self._given = (name, pid, log_path, log_tail, starved)
        self.name, self.pid, self.log_path, self.log_tail, self.starved = name, pid, log_path, log_tail, starved


class SupervisorDied(ChildDied):
    """The supervisor of a process ended, and with it the process on its lifeline."""

    def __init__(self, name: str, why: str):
        RuntimeLayerError.__init__(self, f"the supervisor {name} died: {why}")
        self._given = (name, why)
        self.name, self.pid, self.log_path, self.log_tail, self.starved = name, 0, "", why, False


class ChildTimeout(RuntimeLayerError):
    """The forked process is alive but did not answer within the time given."""


class CopyFailed(RuntimeLayerError):
    """A directory could not be copied from another node: it or the node is gone."""


class ChildError(RuntimeLayerError):
    """An exception raised inside the forked process, transferred as name and message."""

    def __init__(self, type_name: str, message: str, data: dict | None = None):
        super().__init__(f"{type_name}: {message}")
        self._given = (type_name, message, data)
        self.type, self.message, self.data = type_name, message, data or {}
