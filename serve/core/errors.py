"""Errors of the serving side."""

from __future__ import annotations

from collections.abc import Iterator


class ServeError(Exception):
    """Base of all errors raised by `serve`."""


class EngineStartFailed(ServeError):
    """The forked engine ended, or did not answer, before it was healthy; the message ends with the engine's log."""


class EngineRefused(EngineStartFailed):
    """The engine rejected its settings or model at the start, for a reason other than memory, files or devices."""


class EngineOutOfMemory(EngineStartFailed):
    """The engine did not start because host or device memory ran out; a retry may succeed once memory is free."""


class CoreKilled(EngineStartFailed):
    """A process of the engine was killed from outside; the engine's settings and model are not at fault."""


class EngineFailed(ServeError):
    """The engine's weights may not be served. The supervisor has ended the engine; start a new engine."""


class ReloadFailed(EngineFailed):
    """Loading a version into the running engine failed. A new engine may load the version, but other running engines of
    this model and settings would fail too."""


class VersionBroken(EngineFailed):
    """The loaded version computes NaN or infinite numbers, so a new engine would not accept the version either."""


class WrongState(ServeError):
    """The engine's state does not allow the call, such as a swap of a sleeping engine."""


class VersionError(ServeError):
    """This engine cannot load the version. Raised before the engine changes."""


class VersionUnreadable(VersionError):
    """The version's directory is missing, or its files are not a valid safetensors checkpoint."""


class VersionMismatch(VersionError):
    """A new engine can load the version, but this engine cannot: it was built for another model, or weights of its kind
    cannot be replaced."""


class WithoutNumbers(VersionError):
    """Training recorded that the version's weights compute NaN or infinite numbers."""


class FingerprintMismatch(ServeError):
    """The engine's answer to the fingerprint prompt differs from the version's recorded answer."""


def _kinds(kind: type[ServeError]) -> Iterator[type[ServeError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


BY_NAME = {kind.__name__: kind for kind in _kinds(ServeError)}
"""Error classes by the names that other processes report."""
