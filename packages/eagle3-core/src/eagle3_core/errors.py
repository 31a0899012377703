"""The one exception for mistakes a user can fix; commands print it as one line and exit with 2."""

import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

_REASON_CHARACTERS = 240
_LOGGERS = ("huggingface_hub", "datasets")  # tell of each retry and failure in lines of their own


class UserError(ValueError):
    """Says which file and field, what was found, what was expected and what to do."""


@contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Around a library's reader of user files: any failure becomes the one line `what: reason`.

    Parsers raise anything (tokenizers: bare Exception), so every Exception is meant.
    """
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    except UserError:
        raise
    except Exception as error:
        reason = textwrap.shorten(str(error), _REASON_CHARACTERS, placeholder=" ...")
        raise UserError(f"{what}: {reason or type(error).__name__}") from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
