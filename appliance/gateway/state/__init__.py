"""What one gateway process knows: settings, the table in force, what is held, counted and in memory; and its reports.

Never: It opens no listener and answers no request.
Begin with state.py.
"""
