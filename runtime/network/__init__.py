"""Reaches other processes and nodes: listening sockets, connections of strangers, tunnels between nodes.

Never: Knows what is said over a connection once it stands.
Begin with tunnel.py, then newcomers.py.
"""
