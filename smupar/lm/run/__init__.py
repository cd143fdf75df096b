"""Training one run, or a stack of runs: step, loop, folder, checkpoints."""
