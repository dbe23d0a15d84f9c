"""Takes requests from client connections, admits or refuses each, and relays it to an engine or the controller.

Never: Chooses a replica or decides what a key may spend (core does).
Begin with app.py, then inference.py.
"""
