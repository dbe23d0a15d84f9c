"""The controller's process: it assembles store, scheduler, bus and routes on one asyncio loop.

Never: No route and no rule stands here, only their assembly.
Begin with main.py.
"""
