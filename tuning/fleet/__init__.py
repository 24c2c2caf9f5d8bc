"""Tuning on many GPUs: of one host, or of the nodes of a Ray cluster.

members.py     the GPUs of a run: who joins, measures, fails, is refused, and goes
standing.py    whom to believe: a kernel that every GPU is examined by
agreement.py   what two GPUs both say of the finalists
cluster.py     a Ray cluster, and its cores, which compile; gpus.py: its GPUs, as they join
actor.py       what runs on its nodes; cells.py: for cells of benchmarks
"""
