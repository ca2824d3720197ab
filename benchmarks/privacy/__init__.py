"""Privacy of payloads, and their size."""
