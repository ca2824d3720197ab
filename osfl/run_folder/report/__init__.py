"""The results of a run: `metrics.json` for machines, `report.html` for people."""
