"""The trajectory store: adapters for Postgres, one file for each noun.

Every transaction locks rows in one order, whichever of them it needs: advisory locks, dead letters,
train batches, rollouts, attempts, groups, runs, processes, rescores, remote sessions; and rows of
one table by their ids. So no two transactions wait for each other. `SKIP LOCKED` waits for nothing
and may stand anywhere, and so may statements that insert rows of which no other transaction knows.
Frames of journals are inserted in a transaction of their own. Locks of runs are `NO KEY UPDATE`:
the foreign key of a train batch locks the key of its run.
"""
