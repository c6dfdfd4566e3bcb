"""The connections between the processes of one worker, and those of its other processes to the broker."""
