"""Reads every byte that the tiers hold and compares it with its checksum.

A damaged copy on disk or in the remote tier is replaced when it is needed, because reading it back compares it. From
shared memory engines load without hashing, so a damaged copy there is removed at once if a tier has it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from appliance.tiers.tiers import Tiers
from weights.format.errors import IntegrityError, NotSealed, TierUnavailable, VersionNotFound
from weights.tiers.record import Name

Report = Callable[[float, float | None, str, str], None]


@dataclass
class Checked:
    """`whole`: {"name", "version", "path", "tensors", "bytes"} of every copy that agrees with its checksums.
    `unsealed`: copies in shared memory whose checksums are not made yet. `faults`: what is damaged or cannot be
    reached, as text.
    """

    whole: list[dict[str, Any]] = field(default_factory=list)
    unsealed: int = 0
    faults: list[str] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        return {
            "tensors": sum(copy["tensors"] for copy in self.whole),
            "bytes": sum(copy["bytes"] for copy in self.whole),
        }


def check(tiers: Tiers, names: Iterable[Name], report: Report) -> Checked:
    """Reads every copy of these. A copy that is gone meanwhile does not count."""
    found, read_bytes = Checked(), 0
    for name in names:
        bad_in_memory, whole_in = -1, []
        for copy in tiers.copies(name):
            report(read_bytes, None, "bytes", f"reading {name} in {copy.place}")
            try:
                manifest = copy.verify()
            except NotSealed:
                found.unsealed += 1
            except (VersionNotFound, FileNotFoundError):
                continue
            except IntegrityError as error:
                if copy.tier is None:
                    bad_in_memory = len(found.faults)
                else:
                    tiers.note(copy.tier, f"{name} is damaged: {error}")
                found.faults.append(f"{name} is damaged in the {copy.place} tier: {error}")
            except (TierUnavailable, OSError) as error:
                found.faults.append(f"{name} cannot be read in the {copy.place} tier: {error}")
            else:
                read_bytes += manifest.nbytes
                whole_in.append(copy.place)
                facts = {"tensors": manifest.tensors, "bytes": manifest.nbytes}
                found.whole.append({"name": str(name), "version": name.version, "path": copy.where, **facts})
        if bad_in_memory >= 0 and whole_in:
            found.faults[bad_in_memory] += f"; {tiers.drop_from_memory(name, whole_in[0])}"
    report(read_bytes, read_bytes, "bytes", "everything was read")
    return found
