"""The log of a run."""

import logging

from osfl.util.text import sanitize_record

# Flower carries the lines of this logger to `flwr log`
log = logging.getLogger("flwr")
log.addFilter(sanitize_record)
