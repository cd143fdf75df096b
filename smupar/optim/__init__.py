"""Learning rates: groups for any optimizer, a guard for the ratios between them, and layer rates that change during
training."""
