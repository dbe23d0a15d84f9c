"""Engines as the controller knows them: their sizes and settings, the versions they load, and who is routed to them.

Never: Starts or stops an engine; the scheduler does.
Begin with routing_table.py.
"""
