"""Client halves: `make_payload(job) -> Payload`, the only code that touches private images."""
