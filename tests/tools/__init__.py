"""Tools for developers of the code."""
