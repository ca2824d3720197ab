"""Malicious clients, and what the defenses do about them."""
