"""Names accelerators that the box cannot use, so that a machine with them is told why instead of computing on its
processors unasked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Unsupported:
    """`control`: the file that its driver makes. `missing`: what the box would need, for a sentence."""

    title: str
    control: Path
    missing: str

    @property
    def reason(self) -> str:
        return f"this machine has {self.title} ({self.control}), which the box cannot use: {self.missing}"


UNSUPPORTED = (
    Unsupported(
        "Huawei Ascend NPUs",
        Path("/dev/davinci_manager"),
        "there is no kind of device for them (runtime/devices/), torch needs the package torch_npu and vLLM the "
        "plug-in vllm-ascend, which pins another vLLM than the box's, and loading in place and sleep rest on vLLM's "
        "own worker",
    ),
)


def found() -> tuple[Unsupported, ...]:
    """Those of this machine."""
    return tuple(one for one in UNSUPPORTED if one.control.exists())
