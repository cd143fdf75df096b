"""The paper's figures and tables.

figures    a file for each figure, table and study of our own: what to run, draw and claim
figure     what such a file consists of
settings   the settings of the paper, at several scales
catalogue  all figures, by name
reproduce  runs a figure, and judges its claim; page: the page that fills in meanwhile
stages     which runs a figure needs, in which order; cost: what they would cost
publish    writes the numbers of a figure, and its page (results_page); published: reads the numbers again
"""
