"""The check over a whole run: do updates keep their size until the end?

long_run  trains and observes the models of the grid
drift     how sizes depend on width, density and depth at each observed step (a look)
causes    likely causes of a drift
report    the result in words and as JSON
"""
