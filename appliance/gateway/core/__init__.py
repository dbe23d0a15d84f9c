"""What all of the gateway knows: settings, errors, URLs, the controller's table, and the choice of a replica.

Never: Opens a socket or reads a clock.
Begin with routes.py, then router.py.
"""
