"""Checks that a GPT of 124 M parameters takes the memory on the simulated GPU that arithmetic predicts.

Prints torch's counters and the addresses; they are the same in every run.
"""

import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, WIDTH, VOCABULARY, BATCH, LENGTH = 12, 12, 768, 50304, 8, 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (t.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(BATCH, LENGTH, WIDTH))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).view(-1, VOCABULARY), targets.view(-1))


def requested():
    """Returns the bytes that the program requested and still holds."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


started = time.monotonic()
torch.manual_seed(0)
with torch.device("cuda"):
    model = GPT()
parameters = sum(4 * parameter.numel() for parameter in model.parameters())
assert requested() == parameters, "parameters, to the byte"
# The allocator does not split a block of the large pool if less than 1 MiB would remain.
assert 0 <= torch.cuda.memory_allocated() - parameters < 0.01 * parameters

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
forward = 0
for step in range(3):
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).cuda()
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")
    before = requested()
    loss = model(tokens, targets)
    forward = requested() - before
    loss.backward()
    if step == 0:
        with_gradients = requested()
    optimizer.step()
    if step == 0:
        assert requested() - with_gradients == 2 * parameters, "AdamW's two moments, to the byte"
    optimizer.zero_grad(set_to_none=True)
    assert loss.item() == 0.0

# The tensors that each transformer block keeps for its backward: its input, ln_1's output and two statistics,
# q, k and v, the attention's output and logarithms, the sum after it, ln_2's output and statistics, fc's
# output and gelu's.
rows = BATCH * LENGTH
block = 16 * rows * WIDTH + 4 * rows + BATCH * HEADS * LENGTH
# Outside the blocks: the last sum, ln's output and statistics, and the log-softmax over the vocabulary.
expected = 4 * (LAYERS * block + 2 * rows * WIDTH + 2 * rows + rows * VOCABULARY)
assert abs(forward - expected) < 0.005 * expected, (forward, expected)

stats = torch.cuda.memory_stats()
for key in ("allocated_bytes", "reserved_bytes"):
    print(key, stats[f"{key}.all.current"], stats[f"{key}.all.peak"])
assert stats["num_ooms"] == 0 and stats["num_alloc_retries"] == 0
segments = torch.cuda.memory_snapshot()
assert sum(segment["total_size"] for segment in segments) == stats["reserved_bytes.all.current"]
free, total = torch.cuda.mem_get_info()
assert total - free >= stats["reserved_bytes.all.current"]
print("segments", [(hex(segment["address"]), segment["total_size"]) for segment in segments])
print("parameters", [hex(parameter.data_ptr()) for parameter in model.parameters()][:20])

# The run takes 2 to 5 seconds on an idle machine; the test sets no limit.
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
assert resident < 2 << 30, resident
if "--bounds" in sys.argv:
    print(f"{time.monotonic() - started:.1f} s, {resident / 2**30:.2f} GiB resident")
