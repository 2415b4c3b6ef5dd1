"""Training loops whose steps mostly repeat each other, or hardly ever.

    loops.py MODE[,MODE...] STEPS [large] [SECONDS]

Several modes run as forked.py says. `large` is a GPT of 124.5 M parameters; a step takes SECONDS at least.

Before each step torch's own figures are recorded (`checkpoint`), unless the mode ends in `-bare`.

plain    a step like the one before
print    prints the loss every 10 steps, and evaluates every 20
amp      autocast, a gradient scaler and two micro-batches in a step
varying  sequences of another length in each step
threads  two models, each in a thread of its own
ddp      one of the ranks that torchrun starts, with DistributedDataParallel
loader   batches from a DataLoader with pinned memory, copied without waiting
kill     as plain; SIGKILL in the middle of the last step
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # once, not in every child: the first step of an optimizer imports it

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import forked
from checkpoints import checkpoint
from train_gpt import GPT

steps, chosen = int(sys.argv[2]), forked.each(sys.argv[1].split(","), is_frozen=True)
mode, is_bare = chosen.removesuffix("-bare"), chosen.endswith("-bare")
is_large = "large" in sys.argv
seconds = float(sys.argv[-1]) if "." in sys.argv[-1] else 0.0
torch.manual_seed(0)
torch.set_num_threads(1)
if mode == "ddp":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")


def new_model():
    with torch.device("cuda"):
        return GPT() if is_large else GPT(vocabulary=512, context=64, width=64, heads=2, layers=3)


WORDS, LENGTH = (50304, 1024) if is_large else (512, 64)
model = new_model()
if mode == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(WORDS, (4, LENGTH)).cuda()


def note():
    if not is_bare:
        checkpoint("step")


def train(batch, of=model, by=optimizer):
    time.sleep(seconds)
    loss = of(batch, batch)
    loss.backward()
    by.step()
    by.zero_grad()
    return loss


def plain():
    for _ in range(steps):
        note()
        loss = train(tokens)
    return loss


def printing():
    for step in range(steps):
        note()
        loss = train(tokens)
        if step % 10 == 9:
            print(loss.item())
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                model(tokens[:2], tokens[:2])
            model.train()


def amp():
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(steps):
        note()
        time.sleep(seconds)
        for batch in tokens.chunk(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch, batch) / 2
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def varying():
    for step in range(steps):
        note()
        train(tokens[:, : LENGTH // 8 + step * 37 % (LENGTH - LENGTH // 8)])


def threads():
    def loop():
        own = new_model()
        by = torch.optim.AdamW(own.parameters())
        for _ in range(steps):
            train(tokens, own, by)

    both = [threading.Thread(target=loop) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    note()


def loader():
    data = torch.utils.data.TensorDataset(torch.randint(WORDS, (4 * steps, LENGTH)))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True):
        note()
        train(batch.cuda(non_blocking=True))


def kill():
    # Holds the loss of the last step, so that its block is still live at the kill.
    kept = plain()
    model(tokens, tokens)
    os.kill(os.getpid(), signal.SIGKILL)
    return kept


{
    "plain": plain,
    "ddp": plain,
    "print": printing,
    "amp": amp,
    "varying": varying,
    "threads": threads,
    "loader": loader,
    "kill": kill,
}[mode]()
