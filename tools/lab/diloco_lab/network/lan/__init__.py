"""`make lan`: syncs over lines of 1 Gb/s, 100 and 50 Mb/s, as an office or a home has them."""
