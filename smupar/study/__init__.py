"""Studies of many runs. What to run (sweep, transfer, tune), running it (engines), storing it (store) and reporting it (report)
are separate."""
