"""The controller process: assembles store, scheduler, bus and routes on one asyncio loop.

Never: Contains routes or rules at this level, only how they are built.
Begin with main.py.
"""
