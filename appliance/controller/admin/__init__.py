"""The admin API under /admin/v1 for the box as a whole, its views, and the controller's metrics; the CLI is its client.

Never: Contains scheduler rules; each route calls the port of the component that owns the state.
Begin with box.py.
"""
