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


class NotEnoughDisk(ModelError): ...


class NotEnoughMemory(ModelError): ...


class HubError(ModelError): ...


class HubDisallowed(HubError): ...


class HubNotFound(HubError): ...


class HubUnreachable(HubError): ...


class DownloadCorrupt(HubError): ...
