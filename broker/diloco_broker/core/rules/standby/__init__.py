"""What a hub does about its standby: see `fence`."""
