"""Tables of methods: table files, their runs, and the results as Markdown, CSV and a plot."""
