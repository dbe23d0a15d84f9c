"""Defines kinds of devices, one file each: discovery, visibility to a process, health, page locking, copies.

Never: Assigns a device. The files import torch only inside methods that compute.
Begin with kind.py, then kinds.py.
"""
