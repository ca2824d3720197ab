"""From payloads to images: plan, samplers, guidance, image store."""
