"""Data sets and how they are cut into clients."""
