"""Small programs that show known defects on a CPU, one for each: `megatron-mtp-patches reproduce ID`.

    programs/   one module for each defect that a CPU can show, called after its id (ML-5047: ml_5047.py)
    lab.py      what they share: process groups, small models, comparisons; fsdp_lab.py, moe_lab.py, mxfp8_lab.py,
                qk_clip_lab.py and trainer_lab.py for Megatron-FSDP, experts, MXFP8 parameters, QK clipping and the log
                of Megatron's trainer
    needs.py    which packages a program needs and this environment lacks
    runner.py   runs a program on forked ranks, as Megatron is and with the patches
    standalone.py   writes a program and what it uses of these modules into one file (`--standalone`), which ends with
                standalone_main.py

A program has a docstring that says what it does, and

    RANKS = 2                 # of 1 to 4; 1 if it says nothing
    NEEDS = ("transformer-engine>=2.13",)   # packages as pip takes them (TransformerEngine brings einops), and of
                              # Megatron "megatron.training", which the wheel of 0.16.1 lacks, and "Muon"
    EXPECTED = "a step"       # where the defect is an error or a hang: what should come of it
    WITHOUT_CUDA = True       # where Megatron asks for no torch.cuda: a standalone file of it also runs on a CPU

    def reproduce():          # on each rank, in a fresh fork with Megatron imported
        return expected, seen   # numbers, texts, or lists of them
"""
