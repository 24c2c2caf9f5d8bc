"""A file of this folder is put into the package of the same path: see test_option.py."""
