"""Where the README's figures come from. Each module is a command: `python -m benchmarks.NAME`."""
