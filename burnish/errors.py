"""What Burnish says when it is given something it cannot use."""


class InputError(ValueError):
    """Bad input. The message is one line that names the place (file, row, key) and the mend.

    The command line prints the message alone and exits with status 2.
    """
