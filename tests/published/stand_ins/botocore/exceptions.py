"""Its error."""


class ClientError(Exception):
    pass
