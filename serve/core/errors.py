"""Errors of the serving side.

ServeError
├── InvalidReplicaSpec      a replica was described in a way no engine can be started from
├── EngineStartFailed       the engine process ended, or did not become healthy in time
│   └── EngineOutOfMemory   because memory ran out
├── EngineFailed            the engine is in no usable state; kill it and start a new one
├── WrongState              the engine is asked for something its present state does not allow
├── VersionError            a version cannot be loaded into this engine; the engine serves on unchanged
│   ├── VersionUnreadable   the version's directory is missing or not a valid checkpoint
│   └── VersionMismatch     tensors, configuration or tokenizer differ from what the engine was built for
├── SwapFailed              loading began and failed; the version from before is back and serving
└── FingerprintMismatch     the loaded weights do not answer as their version is known to answer
"""

from __future__ import annotations


class ServeError(Exception):
    """Base of everything raised by `serve`."""


class InvalidReplicaSpec(ServeError):
    """A field of a ReplicaSpec is unusable."""

    def __init__(self, field: str, given: object, expected: str):
        super().__init__(f"replica spec: {field} is {given!r}, expected {expected}")
        self.field = field


class EngineStartFailed(ServeError):
    """The forked engine ended, or did not answer, before it was healthy; the message ends with its log."""


class EngineOutOfMemory(EngineStartFailed):
    """The engine did not start because the host's or the device's memory ran out: it may when some is free again."""


class EngineFailed(ServeError):
    """Neither the new nor the old version could be brought up. The engine must be killed and started anew."""


class WrongState(ServeError):
    """A call that the engine's present state does not allow, such as a swap while it sleeps."""


class VersionError(ServeError):
    """A version cannot go into this engine. Raised before the engine is touched."""


class VersionUnreadable(VersionError):
    """The version's directory is missing, or its files are not a valid safetensors checkpoint."""


class VersionMismatch(VersionError):
    """The version is readable but belongs to another model than the engine was built for."""


class SwapFailed(ServeError):
    """The new version failed while it was being loaded; the engine has its old version back and serves it."""


class FingerprintMismatch(ServeError):
    """The fingerprint prompt was answered differently than this version is recorded to answer it."""


BY_NAME: dict[str, type[ServeError]] = {
    error.__name__: error
    for error in (
        EngineStartFailed,
        EngineOutOfMemory,
        EngineFailed,
        WrongState,
        VersionUnreadable,
        VersionMismatch,
        SwapFailed,
        FingerprintMismatch,
    )
}
