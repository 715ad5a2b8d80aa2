"""Known defects of Megatron: how one is declared, and found in a source.

    declare.py      a `Defect`; those of a topic are in the `DEFECTS` of its *defects.py (fsdp/buffer_defects.py)
    conditions.py   what conditions of several defects ask of a run
    probe.py        asks a source whether it has a defect
    rewriting.py    puts the `Diff` of a defect into a source
    catalog.py      all defects, and the releases that have each
    labs/           what programs share: lab.py has process groups, small models and comparisons

reproductions/ runs the programs that show them.
"""
