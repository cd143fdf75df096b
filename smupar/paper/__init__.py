"""The paper's figures and tables.

figures    a file for each figure, table and study of our own: what to run, draw and claim
figure     what such a file consists of
settings   the settings of the paper, at several scales
reproduce  runs a figure, and judges its claim; page: the page that fills in meanwhile
publish    writes a page with all numbers; published: reads it again
"""
