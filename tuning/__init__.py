"""Tuning: which schedule is best for a shape, found by measuring on the GPU at hand.

Imports `warploom.runtime`, never the reverse: no call needs what is here.

problems.py   what is tuned: operations of a configuration, at shapes
search.py     which schedules of one problem to measure next, and which of them wins
searches.py   the search that a problem begins with
judgement.py   an old record beside what the model would choose
journal.py    every outcome on disk as it happens: what a second start resumes from
gpu.py        the interface of what measures, and a process of its own that does so
worker.py     that process; replay.py: a recorded sweep in its place
tuner.py      the run: compiles ahead, measures, records, keeps to the budget
fleet/        the GPUs of a run: of this host, or of a cluster
autotune/     tuning between calls that asks nothing
ahead.py      which kernels the same calls run on a GPU that is not here
recording.py  which calls a program makes; calls.py: their file
bench.py      any shape, measured beside the same in torch
"""
