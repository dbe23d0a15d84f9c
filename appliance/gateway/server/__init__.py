"""Takes requests from client connections, admits or refuses each, and has it answered.

Never: Relays anything to engines or controller itself.
Begin with app.py, then exchange.py.
"""
