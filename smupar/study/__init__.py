"""Studies of many runs. What to run (sweep, transfer, tune), how to run it (engines), where it is stored (store) and how it is
reported (report) are separate."""
