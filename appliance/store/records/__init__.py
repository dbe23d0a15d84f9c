"""Tables of what the box itself keeps: keys, usage, audit, deployments, canaries, hand-overs, windows.

Never: Holds a rule of the API; the tables here need no SQL of their own, each file has one that does.
Begin with keys.py.
"""

from appliance.store.rows import AUDIT as audit
from appliance.store.rows import CANARIES as canaries
from appliance.store.rows import DEPLOYMENTS as deployments
from appliance.store.rows import OPERATIONS as operations
from appliance.store.rows import TIER_REMOVALS as tier_removals
from appliance.store.rows import WINDOWS as windows

__all__ = ["audit", "canaries", "deployments", "operations", "tier_removals", "windows"]
