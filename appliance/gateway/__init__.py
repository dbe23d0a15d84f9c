"""The public HTTP endpoint: a process of its own that authenticates, holds, routes and relays bytes."""

from appliance.gateway import compiled

FORM = compiled.use(__path__)
