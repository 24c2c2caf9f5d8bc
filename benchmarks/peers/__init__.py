"""What is measured of each family, and beside what: a module here is one (see families.py).

Those whose names begin with `_` hold what several share, or a part of one.
"""
