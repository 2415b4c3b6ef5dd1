"""One request for more than the card has: request.py attention|distances|onehot|typo [fix]."""

import sys

import torch
from torch.nn import functional as F

KIND, FIX = sys.argv[1], "fix" in sys.argv
if KIND == "attention":
    q = torch.randn(1, 8, 12000, 64, device="cuda")
    if FIX:
        F.scaled_dot_product_attention(q.bfloat16(), q.bfloat16(), q.bfloat16())
    else:
        torch.softmax(q @ q.transpose(-1, -2), -1) @ q
elif KIND == "distances":
    points = torch.randn(40000, 64, device="cuda")
    nearest = [torch.cdist(rows, points).min(1) for rows in points.split(1000 if FIX else 40000)]
elif KIND == "onehot":
    labels = torch.arange(8192, device="cuda").repeat(2)
    logits = torch.randn(16384, 8192, device="cuda")
    F.cross_entropy(logits, labels if FIX else F.one_hot(labels, 65536).float()[:, :8192])
elif KIND == "typo":
    torch.zeros(1024, 1024 if FIX else 1024 * 1024, device="cuda")
