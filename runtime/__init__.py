"""Provides what every process of the box shares: logs, sockets, background tasks, tunnels between nodes.

Never: it knows neither vLLM nor DeepSpeed.
Begin with processes/, then background_tasks.py.
"""
