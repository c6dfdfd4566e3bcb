"""What a hub knows of its standby: see `lease`."""
