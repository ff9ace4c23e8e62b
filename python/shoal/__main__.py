"""`shoal` and `python -m shoal`: becomes the command in C, except for `checkpoint`, which is in Python."""
import os
import sys

import shoal


def main() -> None:
    if sys.argv[1:2] == ["checkpoint"]:
        from shoal import _checkpoint_command
        sys.exit(_checkpoint_command.main(sys.argv[2:]))
    try:
        command = str(shoal.command_path())
        os.execv(command, ["shoal", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"shoal: {error}")


if __name__ == "__main__":
    main()
