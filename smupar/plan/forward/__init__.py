"""Runs one forward pass of a copy of a model, and records how it uses each parameter.

run_copy    the pass, which leaves the model, its buffers and the random state as they were
watcher     ``watch``: sees each of torch's basic operations during the pass
operations  derives what is known about the results of an operation from what is known about its inputs
recorder    keeps what is known, and the record of uses so far
flows       what is known: where the values of a tensor come from, and which dimensions of parameters it has
uses        the record that a pass leaves
cache       records of earlier passes, so that a second plan of the same model needs no new pass
"""
