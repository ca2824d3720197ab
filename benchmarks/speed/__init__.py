"""Seconds, memory and bytes."""
