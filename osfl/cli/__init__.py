"""The `osfl` command. It stands above all else, and nothing imports it."""
