"""python -m paper_figures [NAME ...] is mxsim figures."""

import sys

from mxsim.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["figures"]
    main()
