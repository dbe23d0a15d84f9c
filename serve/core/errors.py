"""Errors of the serving side."""

from __future__ import annotations

from collections.abc import Iterator


class ServeError(Exception):
    """Base of all errors raised by `serve`."""


class EngineStartFailed(ServeError):
    """The forked engine ended, or did not answer, before it was healthy; the message ends with its log."""


class EngineRefused(EngineStartFailed):
    """The engine itself said why it does not start with what it was given, and it is no memory, file or device."""


class EngineOutOfMemory(EngineStartFailed):
    """The engine did not start because host or device memory ran out; a retry may succeed when memory is free."""


class CoreKilled(EngineStartFailed):
    """A process of the engine was killed from outside, which says nothing of what it was started with."""


class EngineFailed(ServeError):
    """The engine holds no weights that it may serve. Its supervisor has ended it, and a new one has to start."""


class ReloadFailed(EngineFailed):
    """Loading a version into the running engine failed. A new engine may take it, and no other running one of this
    model with these settings should be asked to."""


class VersionBroken(EngineFailed):
    """The version that was loaded computes no numbers, so a new engine would not take it either."""


class WrongState(ServeError):
    """A call that the engine's present state does not allow, such as a swap while it sleeps."""


class VersionError(ServeError):
    """This engine cannot load the version. Raised before the engine changes."""


class VersionUnreadable(VersionError):
    """The version's directory is missing, or its files are not a valid safetensors checkpoint."""


class VersionMismatch(VersionError):
    """A new engine takes the version, and this one does not: it was built for another model, or its kind of weights
    cannot be replaced."""


class WithoutNumbers(VersionError):
    """Training recorded that the version's weights compute no finite numbers."""


class FingerprintMismatch(ServeError):
    """The answer to the fingerprint prompt differs from the record of this version."""


def _kinds(kind: type[ServeError]) -> Iterator[type[ServeError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


BY_NAME = {kind.__name__: kind for kind in _kinds(ServeError)}
"""As errors of another process are named."""
