"""How two runs differ, and whether they compute the same.

side: one run's step, as input of a comparison. compare: flags, inputs, ops and graphs of two of them. changed_work:
their GPU work. sentences: both in words. faster: why one is faster. same_work, same_jobs: whether two
runs, or two jobs of several ranks, compute the same, which the judges of changes ask.
"""
