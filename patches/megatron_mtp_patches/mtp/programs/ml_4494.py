"""The targets of an MTP head for two packed sequences, of the tokens 1 2 3 and 4 5, each padded with 0 to four tokens:
the next token of the same sequence.
"""

from ...defects.labs.lab import start

WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    start()
    params = pack(torch.tensor([0, 3, 5]).int(), torch.tensor([0, 4, 8]).int())
    rolled, _ = roll_tensor(torch.tensor([[1, 2, 3, 0, 4, 5, 0, 0]]), shifts=-1, dims=-1, packed_seq_params=params)
    return "2 3 0 0 5 0 0 0", " ".join(map(str, rolled[0].tolist()))


def pack(ends, padded_ends):
    """Return the packed sequences' parameters as the trainer gives them to the model."""
    import torch
    from megatron.core import utils
    from megatron.core.packed_seq_params import PackedSeqParams

    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):
        return utils.get_thd_batch_on_this_cp_rank({}, ends, padded_ends, torch.tensor([4]))[1]
    return PackedSeqParams("thd", cu_seqlens_q=padded_ends, cu_seqlens_q_padded=padded_ends)  # since 0.18
