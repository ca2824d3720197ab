"""Server halves: `run(job, payloads) -> {name: GlobalModel}`."""
