"""The results of a run: `metrics.json` for machines, and `report.html` for people."""
