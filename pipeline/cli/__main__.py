"""`python -m pipeline.cli`: the command line where the console script is not on PATH.

Child processes are started this way, so they run with the same interpreter.
"""

from pipeline.cli.app import main

if __name__ == "__main__":
    main()
