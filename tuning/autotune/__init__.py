"""Tuning that asks nothing: problems that calls meet are measured between them, and recorded.

api.py         `warploom.autotune`, and what it tells
engine.py      begins and ends it, and hears of plans; activity.py: who has it active, its thread
course.py      what becomes of each problem that was planned without a record: a thread decides
offers.py      what a later call is offered: to measure, or to run another kernel
problem.py     such a problem, its plans, and the gate at which a call is offered something
helper.py      the process that compiles candidates; preparing.py is what it runs
candidates.py  which kernels are worth measuring, without torch
contest.py     which of them is the fastest within a budget; stage.py: how a GPU times them
outcome.py     what measuring came to; keeping.py: the records, read and written
report.py      what calls came while a context was active, and what is told of them
locks.py       one process tunes a problem, the others read its record
ranks.py       whether all processes of a group decide by the same records
"""
