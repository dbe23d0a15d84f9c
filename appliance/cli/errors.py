"""How a command can fail; the exit codes are part of the interface (docs/operations.md).

CliError              1, as CommandFailed
├── CommandFailed     1   the box did not do it, or the awaited work failed
├── BadUsage          2   the request makes no sense: a wrong argument, file or setting
├── NotFound          3   no such job, model, file, key
├── AuthFailed        4   no key, a wrong one, or one without the scope
├── Conflict          5   the state of the object forbids it
├── Unreachable       6   no box answers
└── WaitTimedOut    124   the awaited work continues (124 as in timeout(1))
"""

from __future__ import annotations


class CliError(Exception):
    """Base class. The message is for people and tells what to do."""

    exit_code = 1


class CommandFailed(CliError):
    exit_code = 1


class BadUsage(CliError):
    exit_code = 2


class NotFound(CliError):
    exit_code = 3


class AuthFailed(CliError):
    exit_code = 4


class Conflict(CliError):
    exit_code = 5


class Unreachable(CliError):
    exit_code = 6


class WaitTimedOut(CliError):
    exit_code = 124


class Ended(Exception):
    """Ends a command that has already printed the reason."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


_OF_STATUS: dict[int, type[CliError]] = {
    **dict.fromkeys((401, 403), AuthFailed),
    **dict.fromkeys((400, 405, 413, 422), BadUsage),
    404: NotFound,
    409: Conflict,
    **dict.fromkeys((502, 503, 504), Unreachable),
}


def of_answer(status: int, message: str, code: str | None) -> CliError:
    """Return the error for an HTTP answer with `status` >= 400, and message and code of OpenAI's error object."""
    kind = WaitTimedOut if code == "wait_timeout" else _OF_STATUS.get(status, CommandFailed)
    return kind(message)
