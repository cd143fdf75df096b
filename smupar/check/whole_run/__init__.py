"""The check over a whole run: do updates keep their size until the end?

``run`` trains and observes the models of the grid, ``drift`` finds how sizes depend on width and density at each look,
``causes`` names likely causes of a drift, and ``report`` puts the result into words.
"""
