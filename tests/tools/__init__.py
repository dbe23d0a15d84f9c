"""Tools of whoever works on the code: which unit tests a change asks for, and the map of the code."""
