"""Control which details of a client's exceptions the server receives.

Without a DP guarantee the server receives the message, which says what to do. With one, a message
could name a label, a file or a patient, so the server receives a code (`osfl.payload.error_codes`)
and the message stays in the site's own log. The exception is `PublicConfigError`, whose message
depends on settings alone and is always sent.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from osfl.config import ConfigError
from osfl.payload.error_codes import error_code
from osfl.util.text import sanitize_lines, sanitize_record

# Characters of an error message that is sent to the server
MAX_ERROR_LENGTH = 4000
# Flower logs a client's exceptions here
log = logging.getLogger("flwr")
log.addFilter(sanitize_record)


class ClientError(RuntimeError):
    """A client's exception with a message that is safe to send: printable and of limited length."""


class PublicConfigError(ConfigError):
    """A ConfigError whose message depends on run-config and node-config alone, not on data."""


@contextmanager
def public_messages() -> Iterator[None]:
    """Mark errors raised in this context as depending on settings alone. Read no data in it.

    Raises:
        PublicConfigError: in place of a ConfigError.
    """
    try:
        yield
    except PublicConfigError:
        raise
    except ConfigError as error:
        raise PublicConfigError(str(error)) from None


def sanitize_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Sanitize exceptions, whose messages Flower sends to the server unchanged. A Flower mod.

    Raises:
        ClientError: in place of an exception whose message has control characters or is too long;
            the traceback is kept.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        if (sanitized := _sanitized(error)) is error:
            raise
    raise sanitized


def encode_private_errors(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Replace an exception's message by a code if there is a DP guarantee. A Flower mod.

    Raises:
        ClientError: the code, without the traceback, which would reveal where the client failed.
        PublicConfigError: as raised, but without its cause.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        if not _has_guarantee(context):
            raise
        log.error("%s failed:", message.metadata.message_type, exc_info=error)
        is_public = isinstance(error, PublicConfigError)
        reply = PublicConfigError(str(error)) if is_public else ClientError(error_code(error))
    # Outside the except block, so that the original is not attached as context
    raise reply


def _has_guarantee(context: Context) -> bool:
    """Return whether the site or the run requires a DP guarantee, or a secure sum.

    Reads the unparsed settings.
    """
    demands = (context.node_config.get(key) for key in ("epsilon", "epsilon-total", "secure-sum"))
    return any(demands) or any(context.run_config.get(key) for key in ("epsilon", "secure-sum"))


def _sanitized(error: Exception) -> Exception:
    text = sanitize_lines(error, MAX_ERROR_LENGTH)
    try:
        if str(error) == text:
            return error
    # str() of an exception may itself fail
    except Exception:
        log.error("an error without a message: %s", type(error).__name__)
    return ClientError(f"{type(error).__name__}: {text}").with_traceback(error.__traceback__)
