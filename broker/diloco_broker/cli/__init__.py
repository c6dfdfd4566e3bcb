"""The command line of `diloco-broker`."""
