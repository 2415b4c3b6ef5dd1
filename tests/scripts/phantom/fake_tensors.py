"""Compiles an attention mask, whose fake tensors have the dispatch keys of plain ones."""

import torch
from torch.nn.attention.flex_attention import create_block_mask


@torch.compile(backend="aot_eager")
def masked(documents):
    return create_block_mask(
        lambda batch, head, query, key: (query >= key) & (documents[query] == documents[key]),
        None,
        None,
        256,
        256,
        device="cuda",
    ).kv_num_blocks


print(masked(torch.zeros(256, dtype=torch.int32, device="cuda")).shape)
