"""What diloco-top shows, as lines of styled text: pure, without a terminal, a clock or a socket."""
