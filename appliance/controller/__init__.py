"""The controller process: assembles store, scheduler, bus and routes on one asyncio loop.

Never: Contains routes or rules at this level, only their assembly.
Begin with main.py.
"""
