"""Engines: their sizes and settings, the versions they load, and the requests routed to them.

Never: Starts or stops an engine; only the scheduler does.
Begin with routing_table.py.
"""
