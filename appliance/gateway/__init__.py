"""The public HTTP endpoint: a separate process that authenticates, holds, routes and relays requests.

Never: Opens a database or starts an engine; keys, models and replicas come from the controller's table.
Begin with server/app.py, then server/inference.py; main.py runs both.
"""
