"""The targets of an MTP head for two packed sequences, of the tokens 1 2 3 and 4 5, each padded with 0 to four tokens:
the next token of the same sequence.
"""

from ...defects.labs.lab import start

WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    start()
    ends, padded_ends = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 4, 8]).int()
    params = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_q_padded=padded_ends)
    rolled, _ = roll_tensor(torch.tensor([[1, 2, 3, 0, 4, 5, 0, 0]]), shifts=-1, dims=-1, packed_seq_params=params)
    return "2 3 0 0 5 0 0 0", " ".join(map(str, rolled[0].tolist()))
