"""What is asked of relays, which take part for the workers of a site."""
