"""The log of a run."""

import logging

from osfl.util.text import plain_record

# Flower carries the lines of this logger to `flwr log`
log = logging.getLogger("flwr")
log.addFilter(plain_record)
