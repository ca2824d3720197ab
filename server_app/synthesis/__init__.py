"""Image synthesis from payloads: plan, samplers, guidance, workers, image files."""
