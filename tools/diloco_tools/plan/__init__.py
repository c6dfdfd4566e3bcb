"""diloco-plan: will my link do? Rounds over lines that are simulated, by the product's own rules."""
