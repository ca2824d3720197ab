"""The Flower ClientApp, which runs where the data is. Never imports `server_app`."""

# It defers what torch and diffusers import needlessly, before a module imports them
import osfl  # noqa: F401
