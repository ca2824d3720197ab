"""Small helpers that know nothing of federations: text, files, costs, seeds, pixels, log."""
