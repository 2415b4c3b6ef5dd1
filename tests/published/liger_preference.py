"""Liger-Kernel: losses on preferred and rejected answers, a linear layer onto 128256 tokens, bf16.

`--variant` orpo, cpo, simpo; orpo-bf16: without the step to fp32. The first published rows have 7 bytes
for each token and entry of the vocabulary, the later ones 14.
"""

import torch
import torch.nn.functional as F
from harness.liger import loss, sweep

VOCABULARY, HIDDEN = 128256, 4096


def log_probabilities(logits, labels):
    mask = labels != -100
    labels = torch.where(labels == -100, 0, labels)
    each = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (each * mask).sum(-1) / mask.sum(-1)


def orpo(chosen, rejected):
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * F.logsigmoid(odds)


def cpo(chosen, rejected, margin=0.0):
    logits = chosen - rejected
    if margin:
        logits = logits - margin
    return F.logsigmoid(0.1 * logits) * 1.0 + F.logsigmoid(-0.1 * logits) * 0.0


def simpo(chosen, rejected):
    return cpo(chosen, rejected, margin=5.0)


LOSSES = {"orpo": orpo, "orpo-bf16": orpo, "cpo": cpo, "simpo": simpo}


def case(B, arguments):
    bf16, cuda = {"dtype": torch.bfloat16}, {"device": "cuda"}
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, **bf16, **cuda)
    liger = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, **bf16, **cuda)  # noqa: F841 - stays allocated
    x = torch.randn(B, arguments.length, HIDDEN, requires_grad=True, **bf16, **cuda)
    target = torch.randint(VOCABULARY, (B, arguments.length), **cuda)
    wide = arguments.variant != "orpo-bf16"

    def policy():
        outputs = x @ head.weight.t()
        logits = outputs.float() if wide else outputs
        flat = logits[: B // 2].view(-1, VOCABULARY)
        likelihood = torch.nn.CrossEntropyLoss()(flat, target[: B // 2].view(-1))
        logs = log_probabilities(logits, target)
        return logs[: B // 2], logs[B // 2 :], logits, likelihood

    def forward():
        chosen, rejected, _logits, likelihood = policy()
        losses = LOSSES[arguments.variant](chosen, rejected)
        return likelihood - losses.mean()

    loss(f"B={B}", forward)


sweep("B", case, length=1024)
