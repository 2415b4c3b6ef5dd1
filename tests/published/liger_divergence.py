"""Liger-Kernel: distances of distributions over a vocabulary, fp32: `--variant` kl, jsd, jsd_rows, tvd."""

import sys

import torch
from harness.liger import loss, measure, sweep

BETA = 0.5


def jsd(q, p):
    kl = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)
    m = torch.lerp(torch.exp(p), torch.exp(q), BETA)
    return BETA * kl(torch.log(m), p) + (1 - BETA) * kl(torch.log(m), q)


def jsd_rows(q, p):
    kl = torch.nn.KLDivLoss(reduction="none", log_target=True)
    m = torch.lerp(torch.exp(q), torch.exp(p), BETA)
    result = BETA * kl(torch.log(m), p).sum(dim=-1) + (1 - BETA) * kl(torch.log(m), q).sum(dim=-1)
    return (result / q.shape[0]).sum()


def tvd(p, q):
    distance = torch.abs(p - q) / 2.0
    return torch.sum(distance) / p.size(0)


LOSSES = {"kl": torch.nn.KLDivLoss(reduction="batchmean"), "jsd": jsd, "jsd_rows": jsd_rows, "tvd": tvd}


def case(value, arguments):
    rows, vocabulary = (value, arguments.vocabulary) if arguments.vocabulary else (arguments.rows, value)
    made = torch.randn(rows, vocabulary, requires_grad=True, device="cuda")
    target = torch.randn(rows, vocabulary, device="cuda")
    if arguments.variant == "tvd":
        mine, theirs = made.softmax(dim=-1), target.softmax(dim=-1)
    elif arguments.variant == "kl":
        mine, theirs = made.log_softmax(dim=-1), target.softmax(dim=-1)
    else:
        mine, theirs = made.log_softmax(dim=-1), target.log_softmax(dim=-1)
    del target
    if arguments.variant == "jsd_rows":
        # This benchmark runs the backward pass by a random gradient of the result's shape.
        loss_of = LOSSES["jsd_rows"]
        measure(f"BT={value}", lambda: loss_of(mine, theirs))
    else:
        loss(f"V={value}", lambda: LOSSES[arguments.variant](mine, theirs), retain=True)


if __name__ == "__main__":
    sweep("BT" if "--BT" in sys.argv else "V", case, again=False, rows=0, vocabulary=0)
