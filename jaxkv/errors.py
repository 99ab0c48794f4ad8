"""The one exception a user can mend: the rule, what was received, the remedy."""


class UserError(ValueError):
    """Something the user can put right; the command line prints it as one line, exit code 2."""
