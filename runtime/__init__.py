"""From tensors to launches: loading kernels, planning calls, dispatch and the operators.

Imports `warploom.generator`, never the reverse. Everything here may assume torch.
"""
