"""Measured updates: the learning rate of each hidden layer is set so that one update changes its output as much as in the
proxy.

For a hidden weight W with inputs X and one update dW, made at a base learning rate eta,

    effect = RMS(X dW) / eta

is what one update does to the layer's output, per unit of base learning rate. ``record_updates`` records it while the small
dense proxy trains; this is the trace. ``follow_updates`` measures gain = RMS(X dW) / (learning rate of the layer) in the
target, and sets the layer's learning rate to eta * effect of the proxy / gain. Before the first measurement it uses the plan's
factor. Nothing about the optimizer or the masks has to be known: dW is what the weights show after ``optimizer.step()``.
Decoupled weight decay is kept out by comparing X W' with (1 - lr * decay) X W, which is what decay alone would leave.

Both sides are averaged over time, 0.8 old and 0.2 new (``trace.averages_after``; one model in ``meter``, a stack in
``stacked``). A trace of another depth is read at the same share of the depth, one of another length as ``trace.same_moment``
says.
"""
