"""Measurements, their tables and notes.

Each program that the README lists is a command: `python -m benchmarks.FOLDER.NAME`.
"""
