"""Runs one forward pass of a copy of a model, and records how it uses each parameter.

run         the pass, which leaves the model, its buffers and the random state as they were
watcher     ``watch``: sees each of torch's basic operations during the pass
operations  what the result of an operation is, given its inputs
recorder    what is known about tensors so far, and the record of uses
flows       where the values of a tensor come from, and which dimensions of parameters it ranges over
uses        the record that a pass leaves
remembered  records of earlier passes, so that a second plan of the same model needs none
"""
