"""The controller process: assembles store, scheduler, bus and routes on one asyncio loop.

Never: Contains routes or rules at this level; it only builds them.
Begin with main.py.
"""
