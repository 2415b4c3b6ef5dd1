"""Liger-Kernel: a linear layer onto a vocabulary of 128256 and a loss, hidden size 4096, bf16.

`--variant` ce: cross entropy; jsd: Jensen-Shannon divergence of a student and a teacher.
"""

import torch
from harness.liger import loss, sweep

VOCABULARY, HIDDEN = 128256, 4096


def linear():
    return torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16, device="cuda")


def cross_entropy(BT, _):
    head, liger = linear(), linear()  # noqa: F841 - Liger's layer stays allocated
    criterion = torch.nn.CrossEntropyLoss()
    x = torch.randn(BT, HIDDEN, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(VOCABULARY, (BT, 1), device="cuda").squeeze(1)

    def forward():
        logits = head(x)
        return criterion(logits, target)

    loss(f"BT={BT}", forward)


def divergence(log_q, log_p):
    kl = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    m = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    result = 0.5 * kl(torch.log(m), log_p) + (1 - 0.5) * kl(torch.log(m), log_q)
    return result.to(torch.bfloat16)


def jsd(BT, _):
    # Both providers share one weight for the student and one for the teacher.
    student, teacher, *liger = (linear() for _ in range(4))
    for one, other in ((student, liger[0]), (teacher, liger[1])):
        one.weight.data = other.weight.data = torch.rand(
            VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda"
        )
    x = torch.rand(BT, HIDDEN, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    y = torch.rand(BT, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def forward():
        student_logits = student(x)
        teacher_logits = teacher(y)
        student_logs = torch.log_softmax(student_logits / 1.0, dim=-1)
        teacher_logs = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return divergence(student_logs, teacher_logs)

    loss(f"BT={BT}", forward)


def case(BT, arguments):
    (jsd if arguments.variant == "jsd" else cross_entropy)(BT, arguments)


sweep("BT", case)
