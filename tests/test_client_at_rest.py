"""What a client keeps at rest: payload cache, privacy ledger, decoded images, round state."""
