"""What every experiment of the lab shares: its command line, records, tables, pages."""
