"""The admin API under /admin/v1 and the controller's metrics: what the CLI shows and changes.

Never: No rule of the scheduler stands here; a route asks the port of whoever owns the state.
Begin with box.py.
"""
