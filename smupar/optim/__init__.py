"""Learning rates: groups for any optimizer, the guard of their ratios, and rates of single layers that change."""
