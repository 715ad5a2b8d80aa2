"""Runs tests as forks of warm processes: importing torch and Megatron takes ten CPU-seconds, a fork takes none.

A test file says what its tests need:

    pytestmark = pytest.mark.forked("patched")                       # a process of that level; see levels.py
    pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]  # each test on 2 ranks

and a test may say it for itself: `@pytest.mark.ranks(2, 4)` runs it on 2 ranks and again on 4. A file without such a
mark runs in the process of pytest itself, which imports neither torch nor Megatron.

pytest-xdist was measured in its place: of 837 tests on one rank, the forks run all in 59 CPU-seconds, and two workers
of xdist take 97 before the first one, because each imports and collects everything. Nor does it start ranks.

The processes, and the files with their code. From "python" on each is a fork of the one above it, or of a level:

    pytest          plugin.py   collects such files and reports their tests; as many run at once as keep the CPUs busy
      a level       server.py   has imported what levels.py says and forks when it is told to; further levels, or
        a test file file.py     collects the file, runs its tests on ranks and merges their reports (reports.py)
          a rank    rank.py     runs the tests that it is given

    processes.py      forked ranks for tests that start some themselves (trainings, ranks that are killed)
    dropped_edits.py  pytest --drop-edits: runs tests without one edit of the patches, until one fails
    noticed.py        which test noticed which edit the last time
    edits.py          the names of the edits; leaves one out in a fork
"""
