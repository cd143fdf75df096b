"""Files, text tables and pictures."""
