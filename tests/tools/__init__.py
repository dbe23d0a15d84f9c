"""Tools of whoever works on the code."""
