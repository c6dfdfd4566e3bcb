"""The fixture `processes` is in the root conftest."""
