"""The files that a run leaves on disk, and their readers. No other code spells their paths."""
