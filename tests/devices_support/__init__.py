"""Simulated drivers of devices that this machine lacks."""
