"""The methods' server halves: `run(job, payloads) -> {name: GlobalModel}`.

Most of them use `server_app.pipeline`.
"""
