"""Training and fitting on a client's own images."""
