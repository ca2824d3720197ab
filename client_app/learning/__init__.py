"""What a client trains or fits on its own images."""
