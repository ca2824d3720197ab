"""The log of a run."""

import logging

from osfl.util.text import plain_record

log = logging.getLogger("flwr")  # Flower carries this logger's lines to `flwr log`
log.addFilter(plain_record)
