"""Tables of what the box itself keeps: keys, usage, audit, deployments, canaries, hand-overs, windows.

Never: Holds a rule of the API; the tables here need no SQL of their own, each file has one that does.
Begin with keys.py.
"""

from appliance.store.rows import AuditRow, DeploymentRow, OperationRow, TierRemovalRow, WindowRow
from appliance.store.table import Table

audit = Table("audit", AuditRow)
# A model without a row here is not served.
deployments = Table("deployments", DeploymentRow, "model", order="created_s, model")
# Imports and verifications.
operations = Table("operations", OperationRow)
# Versions that were deleted and are still to be taken out of a tier.
tier_removals = Table("tier_removals", TierRemovalRow, "tier", "kind", "model", "version", order="created_s")
# Modes that come and go by the clock.
windows = Table("windows", WindowRow)
