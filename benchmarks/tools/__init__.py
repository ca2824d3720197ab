"""Tools for developers: measurements of the code, not of a method."""
