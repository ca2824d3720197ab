"""Defenses against malicious clients and wrong labels, and client contributions."""
