"""`make sites`: two sites behind a slow line, with all workers at the hub and with a relay at each."""
