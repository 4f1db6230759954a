"""`python -m rollout`: the command line, even if the console script is not on PATH.

Child processes are started this way, so they run with the same interpreter.
"""

from rollout.app import main

if __name__ == "__main__":
    main()
