"""The program `python3 -m shoal.job`, which the command `shoal job` runs."""
import sys

from shoal.job.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
