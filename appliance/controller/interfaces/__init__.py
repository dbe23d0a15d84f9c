"""The controller's settings, errors, principals and the ports to the rest of the box.

Never: Imports another package of the controller.
Begin with ports.py.
"""
