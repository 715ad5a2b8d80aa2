"""What only a GPU shows, for a machine without a network that you have for minutes only.

packing.py        pack: wheels and trees of Megatron, with a network
machine.py        run: unpacks them there, and says what machine it is
stages.py         which commands run, in which order, and for how long
running.py        runs them, and writes after each one
training.py       stage: pretrain_gpt.py, with the numbers of each step
reproductions.py  stage: the standalone files of known defects
suites.py         stage: this repository's tests on CUDA
pages.py          take: the tables in ci/gpu
"""
