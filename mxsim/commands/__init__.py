"""What the subcommands of `mxsim` do; mxsim/cli.py declares them."""
