"""Is everything as planned? ``audit`` compares a model and its optimizer with the plan, ``coordinates`` trains a few steps."""
