"""Server halves.

`run(job, payloads) -> {name: GlobalModel}`, most of them by `server_app.pipeline`.
"""
