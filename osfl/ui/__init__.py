"""A local web page on the runs of a folder: `osfl ui`."""
