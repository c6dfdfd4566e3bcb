"""`make sites`: two sites behind a slow line, with a broker for all and with a relay at each."""
