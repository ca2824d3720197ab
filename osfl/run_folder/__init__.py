"""What a run leaves on disk, and who reads it. Nobody else spells a path inside a run's folder."""
