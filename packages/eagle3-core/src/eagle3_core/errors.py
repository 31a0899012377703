"""The one exception for mistakes a user can fix; commands print it as one line and exit with 2."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Says which file and field, what was found, what was expected and what to do."""


@contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Around a library's reader of user files: any failure becomes the one line `what: reason`.

    Parsers raise anything (tokenizers: bare Exception), so every Exception is meant.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"{what}: {lines[0] if lines else type(error).__name__}") from error
