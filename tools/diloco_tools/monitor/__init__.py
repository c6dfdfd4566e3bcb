"""How a run is shown: on a terminal, on a web page, as metrics, and as a report."""
