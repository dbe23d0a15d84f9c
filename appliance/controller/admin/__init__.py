"""The admin API under /admin/v1 and the controller's metrics; the CLI reads and writes through it.

Never: Contains scheduler rules; each route calls the port of the component that owns the state.
Begin with box.py.
"""
