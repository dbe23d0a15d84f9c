"""Routes of the admin API for models: import, show and delete them, deploy them, set their engines, compare canaries.

Never: Moves weights or starts an engine; a route writes what is wanted, or asks a port.
Begin with models.py.
"""
