"""What the server hears of a client's exceptions.

Without a guarantee it hears their words, which say what to do. With one, words could name a label,
a file or a patient, so it hears a code (`osfl.payload.error_codes`), and the site's own log has the
words. Only the words of a `PublicConfigError` are sent then: they depend on settings alone.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from osfl.config import ConfigError
from osfl.payload.error_codes import coded
from osfl.util.text import plain_lines, plain_record

MOST_ERROR = 4000  # characters of an error that is sent to the server
log = logging.getLogger("flwr")  # in which Flower writes what a client raises
log.addFilter(plain_record)


class ClientError(RuntimeError):
    """What a client raised, in words that can be sent: printable, and not too many."""


class PublicConfigError(ConfigError):
    """A ConfigError whose words depend on the run-config and node-config alone, on no data."""


@contextmanager
def public_words() -> Iterator[None]:
    """Mark what is raised in here as depending on settings alone. No data may be read in here.

    Raises:
        PublicConfigError: in place of a ConfigError.
    """
    try:
        yield
    except PublicConfigError:
        raise
    except ConfigError as error:
        raise PublicConfigError(str(error)) from None


def plain_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod: Flower sends the words of an exception to the server as they are.

    Raises:
        ClientError: in place of an exception whose words a terminal would obey, or that has too
            many of them; the traceback is the same.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        if (told := _in_plain_words(error)) is error:
            raise
    raise told


def private_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod: with a guarantee, send a code in place of an exception's words.

    Raises:
        ClientError: the code, without the traceback, which would say where the client failed.
        PublicConfigError: as it was raised, but without what caused it.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        if not _has_guarantee(context):
            raise
        log.error("%s failed:", message.metadata.message_type, exc_info=error)
        known = isinstance(error, PublicConfigError)
        told = PublicConfigError(str(error)) if known else ClientError(coded(error))
    # Outside of the handler: an exception raised in there would carry the first one along
    raise told


def _has_guarantee(context: Context) -> bool:
    """Whether the site or the run asks for a guarantee; settings that cannot be read count too."""
    site = (context.node_config.get(key) for key in ("epsilon", "epsilon-total"))
    return any(site) or bool(context.run_config.get("epsilon"))


def _in_plain_words(error: Exception) -> Exception:
    words = plain_lines(error, MOST_ERROR)
    try:
        if str(error) == words:
            return error
    except Exception:  # it has no words at all
        log.error("an error without words: %s", type(error).__name__)
    return ClientError(f"{type(error).__name__}: {words}").with_traceback(error.__traceback__)
