"""Checks that a model is as planned.

audit        compares a model and its optimizer with the plan
coordinates  trains a few steps, to see whether sizes stay equal over width, density and depth
whole_run    does the same over whole runs
"""
