"""Many runs: what to run (sweep, transfer, tune) is apart from running it (engines), storing it (store) and a page (report)."""
