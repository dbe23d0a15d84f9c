"""The controller's settings, its errors and their JSON, and its callers as the sockets identify them.

Never: Imports another package of the controller.
Begin with principal.py.
"""
