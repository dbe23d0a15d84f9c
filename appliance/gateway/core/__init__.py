"""What all of the gateway knows: settings, errors, URLs, the controller's table, and who may use which replica.

Never: Opens a socket.
Begin with routes.py, then router.py.
"""
