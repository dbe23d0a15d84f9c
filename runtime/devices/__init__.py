"""Defines kinds of devices, one file each: discovery, visibility to a process, health, page locking, copies.

Never: Assigns a device. Its files import torch only when a process calls a method that computes.
Begin with kind.py, then kinds.py.
"""
