"""The public HTTP endpoint: a process of its own that authenticates, holds, routes and relays.

Never: Opens a database or starts an engine; it knows what the controller's table says.
Begin with server/app.py, then server/inference.py; main.py runs both.
"""
