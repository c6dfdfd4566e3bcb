"""What comes of the measurements: figures, tables, a picture."""
