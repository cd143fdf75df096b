"""Checks that a model is as planned.

audit        compares a model and its optimizer with the plan
coord_check  trains the models of a grid and compares their sizes, by one of the two:
whole_run    over whole runs: until when do updates keep their size?
coordinates  over the first steps: do sizes stay equal over width, density and depth?
"""
