"""Checks that everything is as planned. ``audit`` compares a model and its optimizer with the plan. ``coordinates`` trains a
few steps, and ``whole_run`` whole runs, to see whether sizes stay the same."""
