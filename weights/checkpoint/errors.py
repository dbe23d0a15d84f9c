"""Why a model's folder is not taken in, nor opened.

CheckpointRefused       what is there cannot or must not be used (all of these name the file)
├── NotACheckpoint      config.json or weights are missing or make no sense
├── PickleRefused       weights as pickles, which run code when loaded
├── RemoteCodeRefused   the checkpoint wants its own Python code run
├── UnsafeLink          a symlink that leaves the checkpoint
├── UnsupportedModel    an architecture that is neither generating nor embedding text
├── TokenizerRefused    a tokenizer that makes endlessly much of little, does not end, or names other files
└── OpeningRefused      a model that is on the box already, by its name
"""

from __future__ import annotations

from weights.format.errors import WeightsError


class CheckpointRefused(WeightsError):
    """The checkpoint itself is at fault; `file` is the one to look at."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file}: {reason}" if file else reason)
        self.file, self.reason = file, reason


class NotACheckpoint(CheckpointRefused):
    """Something that a Hugging Face checkpoint directory must have is missing or malformed."""


class PickleRefused(CheckpointRefused):
    """Weights in a format that executes code when it is loaded."""


class RemoteCodeRefused(CheckpointRefused):
    """`auto_map`: the checkpoint brings Python code of its own."""


class UnsafeLink(CheckpointRefused):
    """A symbolic link, device or other special file where a plain file is expected."""


class UnsupportedModel(CheckpointRefused):
    """Not a text model that this box can serve."""


class TokenizerRefused(CheckpointRefused):
    """The tokenizer takes time or memory without bound for short texts, or is to be read from files elsewhere."""


class OpeningRefused(CheckpointRefused):
    """A model that came onto the box before there was a rule that its files break; nothing of it was deleted."""

    def __init__(self, model: str, file: str, reason: str):
        super().__init__(
            file,
            f"{reason}. So the files of {model} may not be opened; none was deleted: `appliance model verify {model}` "
            f"looks at them again, `appliance model rm {model}` removes the model",
        )
