"""Start jobs on a local SuperLink or a real one, and follow them to their end."""
