"""`shoal` and `python -m shoal`: becomes the command in C."""
import os
import sys

import shoal


def main() -> None:
    try:
        command = str(shoal.command_path())
        os.execv(command, ["shoal", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"shoal: {error}")


if __name__ == "__main__":
    main()
