"""What asks a broker over a socket without taking part in its run."""
