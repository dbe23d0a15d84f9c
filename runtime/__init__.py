"""Provides what every process of the box shares: logs, sockets, small files, background tasks, tunnels between nodes.

Never: Knows vLLM or DeepSpeed.
Begin with processes/, then background_tasks.py.
"""
