"""Small helpers without knowledge of federations: text, files, costs, seeds, pixels, log."""
