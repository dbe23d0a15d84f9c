"""What can go wrong when a model comes onto the box.

ModelError
├── SourceNotFound          neither a directory here nor a repository name
├── InvalidModelName        a name that no model may have
├── ModelNameRequired       the source gives no usable name
├── NotEnoughDisk           carries the numbers
├── NotEnoughMemory         carries the numbers
└── HubError
    ├── HubDisallowed       the box is offline towards hubs (the default)
    ├── HubNotFound         no such repository, revision, or no access
    ├── HubUnreachable      network; running it again resumes
    └── DownloadCorrupt     the bytes are not those the hub announced

CheckpointRefused           (weights.checkpoint.errors) what is there cannot or must not be used
├── MissingTokenizer        no tokenizer files
├── TemplateRefused         a chat template that is broken, or does not end in time or memory
├── TrialEnded              a trial that was ended from outside; another one may come to another end
└── AdapterRefused          an adapter that its base's engines cannot serve
"""

from __future__ import annotations

from weights.checkpoint.errors import CheckpointRefused


class ModelError(Exception):
    """Base: the message says what was given, what was expected and what to do."""


class SourceNotFound(ModelError):
    """Neither an existing path nor the form of a hub repository."""


class InvalidModelName(ModelError, ValueError):
    """A name that cannot be used in URLs, directories and the `model` field of requests."""


class MissingTokenizer(CheckpointRefused):
    """No tokenizer.json, tokenizer.model or vocab.json with merges.txt."""


class TemplateRefused(CheckpointRefused):
    """The chat template does not compile, or runs away."""


class TrialEnded(CheckpointRefused):
    """Nobody knows what the trial would have come to: the kernel took its process, or the box was too busy for it."""


class AdapterRefused(CheckpointRefused):
    """An adapter that does not fit its base, or is of a kind that engines do not serve."""


class NotEnoughDisk(ModelError):
    """Less free space than the copy needs, beside what is kept free for all else that the box writes."""

    def __init__(self, where: str, needed_bytes: int, free_bytes: int, kept_bytes: int):
        super().__init__(
            f"{where} has {free_bytes / 1e6:,.0f} MB free, this model needs {needed_bytes / 1e6:,.0f} MB and "
            f"{kept_bytes / 1e6:,.0f} MB stay free: free some (`appliance model rm`) or use another data directory"
        )
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class NotEnoughMemory(ModelError):
    """Less host memory than a conversion needs."""

    def __init__(self, file: str, needed_bytes: int, available_bytes: int):
        super().__init__(
            f"converting {file} needs {needed_bytes / 1e9:,.1f} GB of host memory, {available_bytes / 1e9:,.1f} GB are "
            "available: stop other programs or let models sleep (`appliance mode train`), or import the safetensors"
        )
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class HubError(ModelError):
    """Base of what goes wrong with a hub."""


class HubDisallowed(HubError):
    """Downloads are switched off."""

    def __init__(self, repository: str, endpoint: str):
        super().__init__(
            f"{repository!r} is not a directory here, and this box does not talk to model hubs (offline by default). "
            "Give the path of a checkpoint directory, or a package by its name in `appliance model catalog`, or "
            f"allow downloads from {endpoint} with `hub_offline = false` under [box] in the configuration "
            "(`hub_endpoint` names a mirror)"
        )


class HubNotFound(HubError):
    """The hub has no such repository or revision, or does not show it to us."""


class HubUnreachable(HubError):
    """The hub did not answer or the connection broke too often; finished parts are kept."""


class DownloadCorrupt(HubError):
    """A downloaded file does not have the checksum that the hub announced."""

    def __init__(self, file: str, expected: str, found: str):
        super().__init__(
            f"{file} does not have the checksum the hub announced (expected {expected}, got {found}); "
            "it was deleted. Run the import again; if this repeats, something between here and the hub changes files"
        )
        self.file = file
