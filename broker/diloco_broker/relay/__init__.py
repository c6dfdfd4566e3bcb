"""A relay, between the workers of a site and their hub: `core` decides, `daemon` is the process."""
