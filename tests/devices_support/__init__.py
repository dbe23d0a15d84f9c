"""Drivers of devices that this machine lacks."""
