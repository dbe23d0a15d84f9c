"""Bounds requests to a login provider's routes, which come without a key: of each address, and of all together."""

from __future__ import annotations

import ipaddress
from typing import Final

from appliance.gateway.access.allowance import Bucket

LOGINS_PER_MINUTE: Final = 1200
"""What one worker takes, from everybody together; a login is three."""
LOGINS_OF_ADDRESS_PER_MINUTE: Final = 60
MOST_ADDRESSES: Final = 4096
"""Remembered at most; past it the one that asked longest ago is forgotten, and the bound of all still holds."""


class Logins:
    """From this machine itself, where a proxy may stand before the box, only the bound of all holds."""

    def __init__(self, now_s: float) -> None:
        self._all = Bucket(LOGINS_PER_MINUTE, now_s)
        self._of: dict[str, Bucket] = {}

    def take(self, address: str, now_s: float) -> float:
        """Counts a request from `address`. Returns 0, or the seconds after which one would be taken: then none was."""
        own = self._bucket_of(address, now_s)
        buckets = [self._all] if own is None else [own, self._all]
        for bucket in buckets:
            bucket.refill(now_s)
            wait_s = bucket.wait_s(1)
            if wait_s > 0:
                return wait_s
        for bucket in buckets:
            bucket.level -= 1
        return 0.0

    def _bucket_of(self, address: str, now_s: float) -> Bucket | None:
        who = _who(address)
        if who is None:
            return None
        bucket = self._of.pop(who, None) or Bucket(LOGINS_OF_ADDRESS_PER_MINUTE, now_s)
        self._of[who] = bucket  # the last to be forgotten
        if len(self._of) > MOST_ADDRESSES:
            del self._of[next(iter(self._of))]
        return bucket


def _who(address: str) -> str | None:
    """Who has an address: of IPv6 whoever has its /64. None: this machine, or nothing that is an address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return _who(str(found.ipv4_mapped))
        return None if found.is_loopback else str(int(found) >> 64)
    return None if found.is_loopback else str(found)
