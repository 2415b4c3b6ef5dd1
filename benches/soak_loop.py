"""Trains a tiny GPT until a time has passed, and prints a JSON line every second; scripts/soak runs it.

    soak_loop.py SECONDS

It evaluates every 500 steps. After a quarter of the time, it runs out of memory once, and continues.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT

seconds = float(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
with torch.device("cuda"):
    model = GPT(vocabulary=512, context=64, width=64, heads=2, layers=2)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(512, (2, 64)).cuda()
longer = torch.randint(512, (4, 64)).cuda()

started = reported = time.monotonic()
steps = reported_steps = 0
ran_out = False
while (now := time.monotonic()) - started < seconds:
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    steps += 1
    if steps % 500 == 0:
        with torch.no_grad():
            model(longer, longer)
    if not ran_out and now - started > seconds / 4:
        ran_out = True
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    if now - reported >= 1:
        step_ms = (now - reported) / (steps - reported_steps) * 1e3
        reported, reported_steps = now, steps
        stats = torch.cuda.memory_stats()
        print(
            json.dumps(
                {
                    "seconds": round(now - started, 1),
                    "steps": steps,
                    "step_ms": round(step_ms, 3),
                    "allocated": stats["allocated_bytes.all.peak"],
                    "reserved": stats["reserved_bytes.all.peak"],
                }
            ),
            flush=True,
        )
