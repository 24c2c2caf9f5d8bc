"""The families of kernels as torch calls see them, each in a folder of its name.

Folders whose name begins with `_` hold what several families share.
"""
