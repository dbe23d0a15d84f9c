"""The public HTTP endpoint: a process of its own that authenticates, holds, routes and relays bytes.

Never: Opens a database or starts an engine; it knows what the controller's table says.
Begin with gateway.py, then server/dispatch.py and inference/handler.py.
"""

from appliance.gateway import compiled

FORM = compiled.use(__path__)
