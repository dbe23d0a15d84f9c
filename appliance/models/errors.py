"""What can go wrong when a model comes onto the box.

ModelError                  the message says what was given, what was expected and what to do
├── SourceNotFound          neither an existing path nor the form of a hub repository
├── InvalidModelName        a name that cannot be used in URLs, directories and the `model` field of requests
├── NotEnoughDisk           less free space than the copy needs, besides what is kept free
├── NotEnoughMemory         less host memory than a conversion needs
└── HubError
    ├── HubDisallowed       the box is offline towards hubs (the default)
    ├── HubNotFound         no such repository or revision, or no access
    ├── HubUnreachable      the connection broke; running it again resumes
    └── DownloadCorrupt     the bytes are not those the hub announced

CheckpointRefused           (weights.checkpoint.folder) what is there cannot or must not be used
├── MissingTokenizer        no tokenizer.json, tokenizer.model or vocab.json with merges.txt
├── TemplateRefused         a chat template that does not compile, or does not end in time or memory
├── TrialEnded              a trial that was ended from outside; another one may succeed
└── AdapterRefused          an adapter that its base's engines cannot serve
"""

from __future__ import annotations

from weights.checkpoint.folder import CheckpointRefused


class ModelError(Exception): ...


class SourceNotFound(ModelError): ...


class InvalidModelName(ModelError, ValueError): ...


class MissingTokenizer(CheckpointRefused): ...


class TemplateRefused(CheckpointRefused): ...


class TrialEnded(CheckpointRefused): ...


class AdapterRefused(CheckpointRefused): ...


class NotEnoughDisk(ModelError):
    def __init__(self, where: str, needed_bytes: int, free_bytes: int, kept_bytes: int):
        super().__init__(
            f"{where} has {free_bytes / 1e6:,.0f} MB free, this model needs {needed_bytes / 1e6:,.0f} MB and "
            f"{kept_bytes / 1e6:,.0f} MB stay free: free some (`appliance model rm`) or use another data directory"
        )


class NotEnoughMemory(ModelError):
    def __init__(self, file: str, needed_bytes: int, available_bytes: int):
        super().__init__(
            f"converting {file} needs {needed_bytes / 1e9:,.1f} GB of host memory, {available_bytes / 1e9:,.1f} GB are "
            "available: stop other programs or let models sleep (`appliance mode train`), or import the safetensors"
        )


class HubError(ModelError): ...


class HubDisallowed(HubError):
    def __init__(self, repository: str, endpoint: str):
        super().__init__(
            f"{repository!r} is not a directory here, and this box does not talk to model hubs (offline by default). "
            "Give the path of a checkpoint directory, or a package by its name in `appliance model catalog`, or "
            f"allow downloads from {endpoint} with `hub_offline = false` under [box] in the configuration "
            "(`hub_endpoint` names a mirror)"
        )


class HubNotFound(HubError): ...


class HubUnreachable(HubError): ...


class DownloadCorrupt(HubError):
    def __init__(self, file: str, expected: str, found: str):
        super().__init__(
            f"{file} does not have the checksum the hub announced (expected {expected}, got {found}); "
            "it was deleted. Run the import again; if this repeats, something between here and the hub changes files"
        )
