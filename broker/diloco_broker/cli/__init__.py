"""The command `diloco-broker`."""
