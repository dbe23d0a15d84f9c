"""Errors of the import of a model.

ModelError                  the message has the given value, the expected value and what to do
├── SourceNotFound          neither an existing path nor the name of a hub repository
├── InvalidModelName        a name that cannot be used in URLs, directories and the `model` field of requests
├── NotEnoughDisk           less free space than the copy needs plus the space that stays free
├── NotEnoughMemory         less host memory than a conversion needs
└── HubError
    ├── HubDisallowed       the box does not use hubs (the default)
    ├── HubNotFound         no such repository or revision, or no access
    ├── HubUnreachable      the connection broke; a new import resumes
    └── DownloadCorrupt     the bytes do not match the hub's checksum

CheckpointRefused           (weights.checkpoint.folder) the files cannot or must not be used
├── MissingTokenizer        no tokenizer.json, tokenizer.model or vocab.json with merges.txt
├── TemplateRefused         a chat template that does not compile, or exceeds time or memory
├── TrialEnded              a trial that was killed; a new one may succeed
└── AdapterRefused          an adapter that engines of its base cannot serve
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


class NotEnoughDisk(ModelError): ...


class NotEnoughMemory(ModelError): ...


class HubError(ModelError): ...


class HubDisallowed(HubError): ...


class HubNotFound(HubError): ...


class HubUnreachable(HubError): ...


class DownloadCorrupt(HubError): ...
