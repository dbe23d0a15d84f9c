"""The admin API under /admin/v1: the box, its modes, devices, models, keys and people; the CLI is its client.

Never: Contains scheduler rules; each route calls the component with that state.
Begin with box.py.
"""
