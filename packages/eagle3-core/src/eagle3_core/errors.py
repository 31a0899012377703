"""The one exception for mistakes a user can fix; commands print it as one line and exit with 2."""


class UserError(ValueError):
    """Says which file and field, what was found, what was expected and what to do."""
