"""The lock of code that loads networks, and of code in other threads that it would disturb."""

from threading import Lock

# transformers and diffusers change torch's default number format, which is the whole process's,
# while they build a network
LOADING = Lock()
