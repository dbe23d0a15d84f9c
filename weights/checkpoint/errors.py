"""Why a model's folder is not taken in, nor opened.

CheckpointRefused       what is there cannot or must not be used (all of these name the file)
├── NotACheckpoint      config.json or weights are missing or make no sense
├── PickleRefused       weights as pickles, which run code when loaded
├── RemoteCodeRefused   `auto_map`: the checkpoint wants its own Python code run
├── UnsafeLink          a symbolic link, device or other special file, or a name of a file outside the checkpoint
├── UnsupportedModel    an architecture that is neither generating nor embedding text
├── TokenizerRefused    a tokenizer that makes endlessly much of little, or does not end
└── OpeningRefused      a model that came onto the box before there was a rule that its files break
"""

from __future__ import annotations

from weights.format.errors import WeightsError


class CheckpointRefused(WeightsError):
    """The checkpoint itself is at fault; `file` is the one to look at."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file}: {reason}" if file else reason)
        self.file, self.reason = file, reason


class NotACheckpoint(CheckpointRefused): ...


class PickleRefused(CheckpointRefused): ...


class RemoteCodeRefused(CheckpointRefused): ...


class UnsafeLink(CheckpointRefused): ...


class UnsupportedModel(CheckpointRefused): ...


class TokenizerRefused(CheckpointRefused): ...


class OpeningRefused(CheckpointRefused):
    def __init__(self, model: str, file: str, reason: str):
        super().__init__(
            file,
            f"{reason}. So the files of {model} may not be opened; none was deleted; `appliance model rm {model}` "
            "removes the model",
        )
