"""Runs over slow lines in network namespaces: one switch (`lan`), or sites behind a WAN (`sites`)."""
