"""The paper's figures and tables.

figures       a file for each figure and table of the paper, and for each study of our own: what to run, draw and claim
figure        ``Figure``, and what the files of figures share
settings      the settings of the paper, at several scales
catalogue     all figures, by name
reproduce     runs a figure, and judges its claim
page          the page of a figure, which fills in while runs train
stages        which runs a figure needs, in which order
cost          what the runs would cost
publish       writes the numbers of a figure, and its page
results_page  the Markdown of that page
published     reads published numbers again
"""
