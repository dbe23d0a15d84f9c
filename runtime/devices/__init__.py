"""Kinds of devices: one file for each says how it is found, shown to a process, watched, locked for and copied to.

Never: it assigns no device. Its files import no torch until a process calls what computes.
Begin with kind.py, then kinds.py.
"""
