"""The server, which runs on the machine with the GPU. Never imports `client_app`."""

# It defers what torch and diffusers import needlessly, before a module imports them
import osfl  # noqa: F401
