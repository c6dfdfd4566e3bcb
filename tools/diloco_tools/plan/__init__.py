"""diloco-plan: is my link fast enough? Simulates rounds over given links with our own rules."""
