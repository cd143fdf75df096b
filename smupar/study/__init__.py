"""Many runs: what to run (space, tune, transfer) is apart from running it (engines) and from reading it (store, report)."""
