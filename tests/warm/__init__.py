"""Runs tests as forks of warm processes: importing torch and Megatron takes ten CPU-seconds, a fork takes none.

A test file says what its tests need:

    pytestmark = pytest.mark.forked("patched")                       # a process of that level; see levels.py
    pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]  # each test on 2 ranks

and a test may say it for itself: `@pytest.mark.ranks(2, 4)` runs it on 2 ranks and again on 4. A file without such a
mark runs in the process of pytest itself, which imports neither torch nor Megatron.

The files of this package, from the command to the test:

    plugin.py     pytest's hooks: collects such files in forks, reports what their forks report
    jobs.py       starts a job for each file and number of ranks, as many at once as keep the processors busy
    connection.py talks to the warm processes
    server.py     the warm processes, one for each level, each a fork of the level before
    inside.py     pytest in a fork: runs the tests of one job on one rank and sends its reports
    merge.py      one report of a test from those of its ranks
    processes.py  forked ranks for tests that start some themselves (trainings, ranks that are killed)

    dropped_edits.py  pytest --drop-edits: runs tests without one edit of the patches, until one fails
    edits.py          the names of the edits; leaves one out in a fork
"""
