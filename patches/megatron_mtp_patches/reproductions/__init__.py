"""Runs the programs that show a known defect.

    runner.py       runs a program on forked ranks, as Megatron is and with the patches
    needs.py        which packages a program needs and this environment lacks
    standalone.py   writes a program and what it uses of this package into one file (`--standalone`), which ends with
                    standalone_main.py

A program shows one defect on a CPU (`megatron-mtp-patches reproduce ID`). It is in the programs/ of the defect's topic
and is called after its id (ML-5047: moe/programs/ml_5047.py). It has a docstring that says what it does, and

    RANKS = 2                 # of 1 to 4; 1 if it says nothing
    NEEDS = ("transformer-engine>=2.13",)   # packages as pip takes them (TransformerEngine brings einops), and of
                              # Megatron "megatron.training", which the wheel of 0.16.1 lacks, and "Muon";
                              # "Apex" where ColumnParallelLinear has gradient_accumulation_fusion
    EXPECTED = "a step"       # where the defect is an error or a hang: what should come of it
    WITHOUT_CUDA = True       # where Megatron asks for no torch.cuda: a standalone file of it also runs on a CPU

    def reproduce():          # on each rank, in a fresh fork with Megatron imported
        return expected, seen   # numbers, texts, or lists of them
"""
