"""Learning rates: groups for any optimizer, a guard of the ratios between them, and rates of single layers that change."""
