"""Code that every process of the box shares: logs, errors, sockets, background tasks.

Never: Knows vLLM or DeepSpeed.
Begin with processes/, then background_tasks.py and network.py.
"""
